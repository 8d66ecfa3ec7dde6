"""Wiring of the gateway: tokenizer, verifier connection, server, signals."""

import asyncio
import logging

import grpc
from prometheus_client import CollectorRegistry

from gateway.admission import Admission
from gateway.generation import Generator
from gateway.metrics import GatewayMetrics
from gateway.servicer import GenerationServicer
from gateway.sessions import Sessions
from gateway.target_files import read_default_sampling
from gateway.tokenizer import TargetTokenizer
from gateway.verifier_client import POLL_SECONDS, VerifierClient
from tandem.config import StackConfig
from tandem.metrics import serve_metrics
from tandem.rpc import Health, bind, server_options, wait_for_signal
from tandem.v1 import generation_pb2_grpc

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 0.05
"""For what remains to be sent when all generations have ended."""

SERVICES = ["tandem.v1.GenerationService"]


class Gateway:
    """A gateway that can be started and stopped; to be made inside the event loop it runs in."""

    def __init__(self, config: StackConfig, poll_seconds: float = POLL_SECONDS):
        """StartupError if the target's folder cannot be used or a port is taken."""
        section = config.gateway
        self._section = section
        tokenizer = TargetTokenizer.load(config.target)
        default_sampling = read_default_sampling(config.target)

        registry = CollectorRegistry()
        self._metrics = GatewayMetrics(registry)
        self._server = grpc.aio.server(options=server_options(section.max_request_bytes))
        self._health = Health(self._server, SERVICES, section.reflection)
        self._verifier = VerifierClient(
            section.verifier, tokenizer.vocab_size, on_change=self._health.set_ready, poll_seconds=poll_seconds
        )
        sessions = Sessions(section.max_sessions, section.session_ttl_seconds)
        self._admission = admission = Admission(section.max_concurrent_requests)
        self._metrics.gauge("tandem_gateway_requests_in_flight", "Generations now", lambda: admission.in_flight)
        self._metrics.gauge("tandem_gateway_sessions", "Sessions kept", lambda: len(sessions))
        self._metrics.gauge(
            "tandem_gateway_verifier_ready", "1 while the verifier serves", lambda: int(self._verifier.ready)
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
        servicer = GenerationServicer(generator, sessions, tokenizer, self._verifier, default_sampling, self._metrics)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self._server)
        self.port = bind(self._server, section.listen, "gateway.listen")
        """The port it listens on."""
        serve_metrics(section.metrics_listen, "gateway.metrics_listen", registry)

    async def start(self) -> None:
        """Serve. Ready once the verifier is."""
        await self._health.set_ready(False)
        await self._server.start()
        self._verifier.start()
        logger.info("listening at %s, verifier at %s", self._section.listen, self._section.verifier)

    async def stop(self) -> None:
        """Report NOT_SERVING, refuse new generations, give those in flight the configured time, then end them."""
        await self._health.drain()
        await self._admission.drain(self._section.shutdown_grace_seconds)
        # Statuses are still on their way: grpc complains in the log if the server stops at the very same moment.
        await asyncio.sleep(FAREWELL_SECONDS)
        await self._server.stop(FAREWELL_SECONDS)
        await self._verifier.close()


async def run_gateway(config: StackConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    gateway = Gateway(config)
    await gateway.start()
    await wait_for_signal()
    logger.info("stopping: calls in flight have %gs", config.gateway.shutdown_grace_seconds)
    await gateway.stop()
