"""Wiring of the gateway: tokenizer, verifier connection, server, signals."""

import asyncio
import logging

import grpc

from gateway.admission import Admission
from gateway.dashboard.pages import DashboardPages
from gateway.dashboard.state import DashboardState
from gateway.generation import Generator
from gateway.metrics import GatewayMetrics
from gateway.servicer import GenerationServicer
from gateway.sessions import Sessions
from gateway.target_files import read_default_sampling
from gateway.tokenizer import TargetTokenizer
from gateway.verifier_client import POLL_SECONDS, VerifierClient
from tandem.config import StackConfig
from tandem.metrics import new_registry, serve_metrics
from tandem.rpc import Health, bind, server_options, wait_for_signal
from tandem.spans import start_tracing
from tandem.tls import client_files, server_files
from tandem.v1 import generation_pb2_grpc

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 0.05
"""For what remains to be sent when all generations have ended."""

_FOR_STATUSES_SECONDS = 60.0
"""The server's own patience is longer than the drain's, which ends generations with a status that says why."""

SERVICES = ["tandem.v1.GenerationService"]


class Gateway:
    """A gateway that can be started and stopped; to be made inside the event loop it runs in."""

    def __init__(self, config: StackConfig, poll_seconds: float = POLL_SECONDS):
        """StartupError if the target's folder cannot be used or a port is taken."""
        section = config.gateway
        self._section = section
        tokenizer = TargetTokenizer.load(config.target)
        default_sampling = read_default_sampling(config.target)

        registry = new_registry("gateway")
        self._metrics = GatewayMetrics(registry)
        self._server = grpc.aio.server(options=server_options(section.max_request_bytes))
        self._health = Health(self._server, SERVICES, section.reflection)
        self._verifier = VerifierClient(
            section.verifier,
            tokenizer.vocab_size,
            on_change=self._health.set_ready,
            poll_seconds=poll_seconds,
            tls=client_files(section.verifier_tls, "gateway.verifier_tls"),
        )
        sessions = Sessions(section.max_sessions, section.session_ttl_seconds)
        self._admission = admission = Admission(section.max_concurrent_requests)
        self._metrics.observe(
            in_flight=lambda: admission.in_flight,
            sessions=lambda: len(sessions),
            verifier_ready=lambda: int(self._verifier.ready),
        )
        generator = Generator(
            tokenizer,
            default_sampling,
            self._verifier,
            sessions,
            admission,
            self._metrics,
            section.max_tokens_default,
        )
        self._tracing = start_tracing(config.tracing, "gateway")
        servicer = GenerationServicer(
            generator, sessions, tokenizer, self._verifier, default_sampling, self._metrics, self._tracing
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self._server)
        self.port = bind(self._server, section.listen, "gateway.listen", server_files(section.tls, "gateway.tls"))
        """The port it listens on."""
        dashboard = DashboardState(self._verifier, tokenizer, lambda: admission.in_flight, lambda: len(sessions))
        pages = {"dashboard": DashboardPages(dashboard.read, asyncio.get_running_loop())}
        serve_metrics(section.metrics_listen, "gateway.metrics_listen", registry, pages)

    async def start(self) -> None:
        """Serve. Ready once the verifier is."""
        await self._health.set_ready(False)
        await self._server.start()
        await self._health.serve_plainly(self._section.health_listen, "gateway.health_listen")
        self._verifier.start()
        logger.info("listening at %s, verifier at %s", self._section.listen, self._section.verifier)

    async def stop(self) -> None:
        """Take no more calls, give the generations in flight the configured time, then end them."""
        await self._health.drain()
        # Before the drain, not after it: clients that keep a connection are told to open another one, which leads to
        # another gateway. Calls in flight go on.
        closing = asyncio.create_task(self._server.stop(self._section.shutdown_grace_seconds + _FOR_STATUSES_SECONDS))
        await self._admission.drain(self._section.shutdown_grace_seconds)
        # Statuses are still on their way: grpc complains in the log if the server stops at the very same moment.
        await asyncio.sleep(FAREWELL_SECONDS)
        await self._server.stop(FAREWELL_SECONDS)
        await closing
        await self._health.stop()
        await self._verifier.close()
        if self._tracing:
            await self._tracing.close()


async def run_gateway(config: StackConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    gateway = Gateway(config)
    await gateway.start()
    await wait_for_signal()
    logger.info("stopping: calls in flight have %gs", config.gateway.shutdown_grace_seconds)
    await gateway.stop()
