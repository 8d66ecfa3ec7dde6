"""Wiring of the drafter: model, link to the verifier, health, metrics, signals."""

import asyncio
import contextlib
import gc
import logging

import grpc
from prometheus_client import CollectorRegistry

from drafter_service.drafter import Drafter
from drafter_service.loading import load_draft_model
from drafter_service.metrics import DrafterMetrics
from drafter_service.verifier_link import VerifierLink
from tandem.checkpoints.folder import fingerprint
from tandem.config import StackConfig
from tandem.errors import StartupError
from tandem.metrics import serve_metrics
from tandem.rpc import Health, bind, server_options, wait_for_signal
from tandem.speculation import PROTOCOL_VERSION
from tandem.v1 import speculation_pb2

logger = logging.getLogger(__name__)

SERVICE = "tandem.Drafter"
"""Health is SERVING under this name while registered with the verifier."""


async def run_drafter(config: StackConfig) -> None:
    """Draft until SIGTERM or SIGINT."""
    if config.draft_model is None:
        raise StartupError("draft_model: the drafter needs one, the config names none")
    section = config.drafter
    server = grpc.aio.server(options=server_options())
    health = Health(server, [SERVICE], section.reflection)
    port = bind(server, section.listen, "drafter.listen")
    registry = CollectorRegistry()
    serve_metrics(section.metrics_listen, "drafter.metrics_listen", registry)
    metrics = DrafterMetrics(registry)

    model = load_draft_model(config.draft_model, config.target, section)
    # What was loaded lives as long as the process: collections need not look at it.
    gc.freeze()
    link = VerifierLink(
        verifier=section.verifier,
        registration=speculation_pb2.Registration(
            protocol_version=PROTOCOL_VERSION,
            draft_model_fingerprint=fingerprint(config.draft_model),
            block_size=model.config.block_size,
            vocab_size=model.config.vocab_size,
            target_layer_ids=model.config.target_layer_ids,
            hidden_size=model.config.hidden_size,
            drafter_name=section.name,
        ),
        reconnect_max_seconds=section.reconnect_max_seconds,
        new_worker=lambda feature_dtype: Drafter(model, feature_dtype, metrics),
        on_registered=health.set_ready,
        metrics=metrics,
    )
    await server.start()
    await health.set_ready(False)
    logger.info("health at %s:%d, dialling verifier %s", section.listen.rpartition(":")[0], port, section.verifier)

    linked = asyncio.create_task(link.run())
    stopping = asyncio.create_task(wait_for_signal())
    await asyncio.wait({linked, stopping}, return_when=asyncio.FIRST_COMPLETED)
    logger.info("stopping")
    await health.drain()
    linked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await linked
    await server.stop(0.5)
