"""Wiring of the verifier: model, engine, servers, signals."""

import asyncio
import gc
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch
from prometheus_client import CollectorRegistry

from tandem.checkpoints.folder import CheckpointFolder, eos_token_ids, fingerprint
from tandem.config import StackConfig, VerifierConfig
from tandem.errors import StartupError
from tandem.metrics import serve_metrics
from tandem.rpc import Health, bind, server_options, wait_for_signal
from tandem.speculation import SpeculationMode
from tandem.torch_setup import pick_device, set_threads
from tandem.v1 import speculation_pb2_grpc, verification_pb2_grpc
from verifier_service.drafting import Drafting, DraftLimits
from verifier_service.engine import Engine
from verifier_service.features import FeatureProjection
from verifier_service.kv_cache import KvCache
from verifier_service.metrics import VerifierMetrics
from verifier_service.model_runner import ModelRunner
from verifier_service.models.llama import LlamaModel
from verifier_service.scheduler import Scheduler
from verifier_service.servicer import VerifierInfo, VerifierServicer
from verifier_service.speculation.controller import SpeculationController
from verifier_service.speculation.costs import StepCosts, StepCurve
from verifier_service.speculation.planner import SpeculationPlanner
from verifier_service.speculation.warm_up import StepLimits, measure_steps, timed_steps
from verifier_service.speculation_servicer import SpeculationInfo, SpeculationServicer

logger = logging.getLogger(__name__)

SERVICES = ["tandem.v1.VerifierService", "tandem.v1.SpeculationService"]


async def run_verifier(config: StackConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    All torch work, loading included, is done by one thread: a second thread that ever ran a parallel region keeps an
    OpenMP pool of its own, and with more OpenMP threads than cores libgomp stops spinning (measured: steps of the demo
    target take 1.5 times as long).
    """
    section = config.verifier
    server = grpc.aio.server(options=server_options())
    health = Health(server, SERVICES, section.reflection)
    bind(server, section.listen, "verifier.listen")
    registry = CollectorRegistry()
    serve_metrics(section.metrics_listen, "verifier.metrics_listen", registry)

    loop = asyncio.get_running_loop()
    compute = ThreadPoolExecutor(1, "engine")
    engine, info, speculation = await loop.run_in_executor(compute, build, config, registry)
    verification_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(engine, info), server)
    speculation_pb2_grpc.add_SpeculationServiceServicer_to_server(SpeculationServicer(engine, speculation), server)
    # What was loaded lives as long as the process: collections need not look at it.
    gc.freeze()
    running = loop.run_in_executor(compute, engine.run)
    await server.start()
    await health.set_ready(True)
    logger.info("serving %s at %s, context %d, %s", info.model, section.listen, info.max_context, info.dtype)

    stopping = asyncio.create_task(wait_for_signal())
    await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
    await health.drain()
    if not running.done():
        logger.info("stopping: calls in flight have %gs", section.shutdown_grace_seconds)
        await _drain(engine, section.shutdown_grace_seconds)
        engine.stop()
    await asyncio.wait({running})
    await server.stop(0.5)
    if error := running.exception():
        logger.critical("the engine's loop failed; the verifier cannot go on", exc_info=error)
        sys.exit(1)


def build(config: StackConfig, registry: CollectorRegistry) -> tuple[Engine, VerifierInfo, SpeculationInfo | None]:
    """Load the models and put the engine together."""
    section = config.verifier
    set_threads(section.threads)
    device, dtype = pick_device(section.device, "verifier.device"), getattr(torch, section.dtype)
    started = time.perf_counter()
    folder = CheckpointFolder(config.target)
    model = LlamaModel(folder, dtype, device)
    features = FeatureProjection(config.draft_model, model.config, dtype, device) if config.draft_model else None
    runner = ModelRunner(model, features, section.kv_blocks, section.kv_block_tokens, device)
    block_size = features.config.block_size if features else config.drafter.ngram_block_size
    runner.warm_up(block_size if config.speculates else 1)
    logger.info("loaded %s in %.1fs", config.target.name, time.perf_counter() - started)

    wanted = section.max_context or model.config.max_positions
    if wanted > model.config.max_positions:
        raise StartupError(f"verifier.max_context: must be at most the target's {model.config.max_positions}")
    metrics = VerifierMetrics(registry)
    kv = KvCache(section.kv_blocks, section.kv_block_tokens)
    max_context = min(wanted, kv.total * section.kv_block_tokens)
    if max_context < wanted:
        logger.warning("context cut from %d to the KV's %d tokens (verifier.kv_blocks)", wanted, max_context)

    limits, curve = None, StepCurve((1,), (0.01,))
    if config.speculates:
        limits = DraftLimits(block_size - 1, features.config.hidden_size * dtype.itemsize if features else 0)
        curve = _measure(section, runner, max_context)
    drafting = Drafting(limits, kv, runner.read_features, metrics)
    controller = SpeculationController(StepCosts(curve), section.max_draft_nodes)
    planner = SpeculationPlanner(controller, drafting, metrics)
    scheduler = Scheduler(
        kv=kv,
        max_running=section.max_running_sequences,
        max_waiting=section.max_waiting_sequences,
        max_prefill_rows=section.max_prefill_rows,
        draft_timeout_seconds=section.draft_timeout_ms / 1000,
        overlap=section.overlap_drafting,
        budget=planner.budget,
    )
    engine = Engine(scheduler, runner, drafting, planner, metrics)
    metrics.observe_load(engine.load)

    info = VerifierInfo(
        model=config.target.name,
        max_context=max_context,
        vocab_size=model.config.vocab_size,
        eos_token_ids=eos_token_ids(config.target),
        speculation_modes=list(SpeculationMode) if config.speculates else [SpeculationMode.OFF],
        default_speculation_mode=SpeculationMode(section.speculation_mode if config.speculates else "off"),
        max_draft_nodes=section.max_draft_nodes if config.speculates else 0,
        dtype=section.dtype,
        draft_model_fingerprint=fingerprint(config.draft_model) if config.draft_model else "",
        max_waiting_sequences=section.max_waiting_sequences,
    )
    if not config.speculates:
        return engine, info, None
    speculation = SpeculationInfo(
        draft_model_fingerprint=info.draft_model_fingerprint,
        block_size=block_size,
        max_draft_nodes=section.max_draft_nodes,
        vocab_size=model.config.vocab_size,
        target_layer_ids=tuple(features.config.target_layer_ids) if features else (),
        hidden_size=features.config.hidden_size if features else 0,
        dtype=section.dtype,
        verifier_name=section.name,
        max_context=max_context,
    )
    return engine, info, speculation


def _measure(section: VerifierConfig, runner: ModelRunner, max_context: int) -> StepCurve:
    """What steps cost on this machine."""
    sequences = section.max_running_sequences
    limits = StepLimits(
        rows=min(256, sequences * (1 + section.max_draft_nodes), max_context - 1),
        sequences=sequences,
        kv_blocks=section.kv_blocks,
        block_tokens=section.kv_block_tokens,
        max_context=max_context,
    )
    started = time.perf_counter()
    curve = measure_steps(timed_steps(runner, limits), limits, section.warm_up_seconds)
    points = ", ".join(f"{r}: {s * 1e3:.1f}" for r, s in zip(curve.rows, curve.seconds, strict=True))
    logger.info("measured steps in %.1fs; ms by rows: %s", time.perf_counter() - started, points)
    return curve


async def _drain(engine: Engine, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        load = engine.load()
        if load.running + load.waiting == 0:
            return
        await asyncio.sleep(0.05)
