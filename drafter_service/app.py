"""Wiring of the drafter: what it drafts with, link to the verifier, health, metrics, signals."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from drafter_service.metrics import DrafterMetrics
from drafter_service.verifier_link import RoundWorker, VerifierLink
from tandem.checkpoints.model_json import read_vocab_size
from tandem.config import StackConfig
from tandem.errors import StartupError
from tandem.metrics import new_registry, serve_metrics
from tandem.rpc import Health, bind, server_options, wait_for_signal
from tandem.spans import start_tracing
from tandem.speculation import PROTOCOL_VERSION
from tandem.tls import client_files
from tandem.v1 import speculation_pb2

logger = logging.getLogger(__name__)

SERVICE = "tandem.Drafter"
"""Health is SERVING under this name while registered with the verifier."""


@dataclass(frozen=True)
class _Source:
    """What drafts come from."""

    registration: speculation_pb2.Registration
    new_worker: Callable[[str], RoundWorker]
    """Given the dtype of the verifier's features."""


async def run_drafter(config: StackConfig) -> None:
    """Draft until SIGTERM or SIGINT."""
    section = config.drafter
    if section.draft_source == "dflash" and config.draft_model is None:
        raise StartupError("draft_model: the drafter needs one, the config names none")
    tracing = start_tracing(config.tracing, "drafter")
    server = grpc.aio.server(options=server_options())
    health = Health(server, [SERVICE], section.reflection)
    port = bind(server, section.listen, "drafter.listen")
    registry = new_registry("drafter")
    serve_metrics(section.metrics_listen, "drafter.metrics_listen", registry)
    metrics = DrafterMetrics(registry)

    source = _dflash(config, metrics) if section.draft_source == "dflash" else _ngram(config, metrics)
    # What was loaded lives as long as the process: collections need not look at it.
    gc.freeze()
    link = VerifierLink(
        verifier=section.verifier,
        registration=source.registration,
        reconnect_max_seconds=section.reconnect_max_seconds,
        new_worker=source.new_worker,
        on_registered=health.set_ready,
        metrics=metrics,
        tls=client_files(section.verifier_tls, "drafter.verifier_tls"),
        tracing=tracing,
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
    if tracing:
        await tracing.close()


def _dflash(config: StackConfig, metrics: DrafterMetrics) -> _Source:
    # Torch is imported here: an n-gram drafter does without.
    from drafter_service.drafter import Drafter
    from drafter_service.loading import load_draft_model
    from tandem.checkpoints.folder import fingerprint

    assert config.draft_model
    model = load_draft_model(config.draft_model, config.target, config.drafter, metrics)
    registration = speculation_pb2.Registration(
        protocol_version=PROTOCOL_VERSION,
        draft_source=speculation_pb2.DRAFT_SOURCE_DFLASH,
        draft_model_fingerprint=fingerprint(config.draft_model),
        block_size=model.config.block_size,
        vocab_size=model.config.vocab_size,
        target_layer_ids=model.config.target_layer_ids,
        hidden_size=model.config.hidden_size,
        drafter_name=config.drafter.name,
    )
    return _Source(registration, lambda feature_dtype: Drafter(model, feature_dtype, metrics))


def _ngram(config: StackConfig, metrics: DrafterMetrics) -> _Source:
    from drafter_service.ngram_drafter import NgramDrafter

    vocab_size = read_vocab_size(config.target)
    registration = speculation_pb2.Registration(
        protocol_version=PROTOCOL_VERSION,
        draft_source=speculation_pb2.DRAFT_SOURCE_NGRAM,
        vocab_size=vocab_size,
        drafter_name=config.drafter.name,
    )
    return _Source(registration, lambda _: NgramDrafter(config.drafter, vocab_size, metrics))
