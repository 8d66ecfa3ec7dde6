"""Wiring of the verifier: model, engine, servers, signals."""

import asyncio
import gc
import logging
import math
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from prometheus_client import CollectorRegistry

from tandem.checkpoints.folder import CheckpointFolder, fingerprint
from tandem.checkpoints.model_json import eos_token_ids
from tandem.checkpoints.progress import loading_progress
from tandem.config import StackConfig, VerifierConfig
from tandem.errors import StartupError
from tandem.metrics import new_registry, serve_metrics
from tandem.rpc import Health, bind, server_options, wait_for_signal
from tandem.spans import start_tracing
from tandem.speculation import SpeculationMode
from tandem.tls import server_files
from tandem.v1 import speculation_pb2_grpc, verification_pb2_grpc
from verifier_service.drafting import Drafting, DraftLimits
from verifier_service.engine import Engine
from verifier_service.expert_load import ExpertLoad
from verifier_service.kv_cache import KvCache
from verifier_service.loads_file import LoadsFile
from verifier_service.metrics import VerifierMetrics
from verifier_service.model_runner import ModelRunner
from verifier_service.models.architectures import read_config
from verifier_service.parallel.launch import ONLY, Member
from verifier_service.parallel.links import Followers, RankLost
from verifier_service.parallel.step_message import pack
from verifier_service.scheduler import Scheduler
from verifier_service.servicer import VerifierInfo, VerifierServicer
from verifier_service.speculation.controller import SpeculationController
from verifier_service.speculation.costs import StepCosts, StepCurve
from verifier_service.speculation.planner import SpeculationPlanner
from verifier_service.speculation.warm_up import StepLimits, measure_steps, timed_steps
from verifier_service.speculation_servicer import SpeculationInfo, SpeculationServicer
from verifier_service.static_plan import context_of, plan_static
from verifier_service.step_bytes import StepBytes
from verifier_service.target_part import TargetPart, feature_projection, load_part

logger = logging.getLogger(__name__)

SERVICES = ["tandem.v1.VerifierService", "tandem.v1.SpeculationService"]


_END_SECONDS = 5.0
"""What other ranks may take to end, and this one when another is lost."""


async def run_verifier(config: StackConfig, member: Member = ONLY) -> None:
    """Serve until SIGTERM or SIGINT, as rank 0 of the target's ranks. Exits 1 when one of them dies.

    All torch work, loading included, is done by one thread: a second thread that ever ran a parallel region keeps an
    OpenMP pool of its own, and with more OpenMP threads than cores libgomp stops spinning (measured: steps of the demo
    target take 1.5 times as long).
    """
    section = config.verifier
    tracing = start_tracing(config.tracing, "verifier")
    server = grpc.aio.server(options=server_options())
    health = Health(server, SERVICES, section.reflection)
    bind(server, section.listen, "verifier.listen", server_files(section.tls, "verifier.tls"))
    registry = new_registry("verifier")
    serve_metrics(section.metrics_listen, "verifier.metrics_listen", registry)

    loop = asyncio.get_running_loop()
    compute = ThreadPoolExecutor(1, "engine")
    followers = Followers(member.links, member.pids) if member.size > 1 else None
    if followers:
        followers.on_lost(_end_anyway)
    try:
        engine, info, speculation = await loop.run_in_executor(compute, build, config, registry, member, followers)
    except BaseException as problem:
        if followers:
            followers.stop(grace_seconds=0.0)
        if isinstance(problem, RankLost):
            raise StartupError(f"rank {problem.rank}: {problem.reason}") from None
        raise
    verification_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(engine, info, tracing), server)
    drafters = SpeculationServicer(engine, speculation)
    speculation_pb2_grpc.add_SpeculationServiceServicer_to_server(drafters, server)
    # What was loaded lives as long as the process: collections need not look at it.
    gc.freeze()
    running = loop.run_in_executor(compute, engine.run)
    if followers:
        followers.on_lost(engine.fail)
    await server.start()
    await health.set_ready(True)
    await health.serve_plainly(section.health_listen, "verifier.health_listen")
    logger.info("serving %s at %s, context %d, %s", info.model, section.listen, info.max_context, info.dtype)

    loads = None
    if engine.experts and section.parallel.expert_loads:
        loads = LoadsFile(section.parallel.expert_loads, info.model, engine.experts)
        keeping = asyncio.create_task(loads.keep())

    stopping = asyncio.create_task(wait_for_signal())
    await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
    await health.drain()
    if not running.done():
        logger.info("stopping: calls in flight have %gs", section.shutdown_grace_seconds)
        await _drain(engine, section.shutdown_grace_seconds)
        engine.stop()
    await asyncio.wait({running})
    if loads:
        keeping.cancel()
        loads.save()
    drafters.end()
    await server.stop(0.5)
    await health.stop()
    if tracing:
        await tracing.close()
    error = running.exception()
    if followers:
        followers.stop(grace_seconds=0.0 if error else _END_SECONDS)
    if error:
        if not isinstance(error, RankLost):
            logger.critical("the engine's loop failed; the verifier cannot go on", exc_info=error)
        sys.exit(1)


def build(
    config: StackConfig, registry: CollectorRegistry, member: Member = ONLY, followers: Followers | None = None
) -> tuple[Engine, VerifierInfo, SpeculationInfo | None]:
    """Load the models and put the engine together. RankLost if one of the followers cannot do its part."""
    section = config.verifier
    started = time.perf_counter()
    folder = CheckpointFolder(config.target)
    shape = read_config(folder)
    if section.parallel.expert_loads and shape.mixture is None:
        raise StartupError(f"verifier.parallel.expert_loads: {config.target} has no mixture of experts")
    with loading_progress(config.target.name, shape.layers) as progress:
        part = load_part(config, folder, member, progress)
    model, device = part.model, part.device
    features = feature_projection(config, part)
    tell_ranks = None
    if followers:
        assert part.group
        followers.on_lost(part.group.abort)
        followers.wait_until_ready()
        tell_ranks = lambda step: followers.send(pack(step))  # noqa: E731
    static = plan_static(config, model, device)
    runner = ModelRunner(model, features, section.kv_blocks, section.kv_block_tokens, device, tell_ranks, static)
    _capture(runner)
    block_size = features.config.block_size if features else config.drafter.ngram_block_size
    runner.warm_up(block_size if config.speculates else 1)
    logger.info("loaded %s in %.1fs", config.target.name, time.perf_counter() - started)

    metrics = VerifierMetrics(registry)
    metrics.set_ranks(member.size)
    if followers:
        followers.on_lost(metrics.count_rank_failure)
    kv = KvCache(section.kv_blocks, section.kv_block_tokens)
    wanted, max_context = section.max_context or model.max_positions, context_of(section, model)
    if max_context < wanted:
        logger.warning("context cut from %d to the KV's %d tokens (verifier.kv_blocks)", wanted, max_context)

    limits, curve = None, StepCurve((1,), (0.01,))
    if config.speculates:
        metrics.expect_positions(block_size - 1)
        limits = DraftLimits(block_size - 1, features.config.hidden_size * model.dtype.itemsize if features else 0)
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
    experts, sizes = _expert_load(config, part), _step_bytes(part, member.size)
    shows = section.show_last_draft
    engine = Engine(scheduler, runner, drafting, planner, metrics, experts, sizes, runner.buckets, shows)
    metrics.observe_load(engine.load)

    info = VerifierInfo(
        model=config.target.name,
        max_context=max_context,
        vocab_size=model.vocab_size,
        eos_token_ids=eos_token_ids(config.target),
        speculation_modes=list(SpeculationMode) if config.speculates else [SpeculationMode.OFF],
        default_speculation_mode=SpeculationMode(section.speculation_mode if config.speculates else "off"),
        max_draft_nodes=section.max_draft_nodes if config.speculates else 0,
        dtype=section.dtype,
        draft_model_fingerprint=fingerprint(config.draft_model) if config.draft_model else "",
        max_waiting_sequences=section.max_waiting_sequences,
        shows_last_draft=shows,
    )
    if not config.speculates:
        return engine, info, None
    speculation = SpeculationInfo(
        draft_model_fingerprint=info.draft_model_fingerprint,
        block_size=block_size,
        max_draft_nodes=section.max_draft_nodes,
        vocab_size=model.vocab_size,
        target_layer_ids=tuple(features.config.target_layer_ids) if features else (),
        hidden_size=features.config.hidden_size if features else 0,
        dtype=section.dtype,
        verifier_name=section.name,
        max_context=max_context,
    )
    return engine, info, speculation


def _capture(runner: ModelRunner) -> None:
    if not runner.static:
        return
    started = time.perf_counter()
    runner.capture()
    states = runner.static.states()
    captured = sum(state.captured for state in states)
    logger.info("captured %d of %d buckets in %.1fs", captured, len(states), time.perf_counter() - started)


def _expert_load(config: StackConfig, part: TargetPart) -> ExpertLoad | None:
    mixture, parallel = part.model.config.mixture, config.verifier.parallel
    if mixture is None:
        return None
    cut = parallel.experts == "cut"
    layers = sorted(mixture.layers)
    return ExpertLoad(layers, mixture.experts, part.model.expert_bytes, parallel.ep, cut, part.placement)


def _step_bytes(part: TargetPart, ranks: int) -> StepBytes:
    """From rank 0's part: ranks that do not split a weight, or the KV, all read it."""
    model = part.model
    head = model.head_bytes * (ranks if model.head_is_split else 1)
    kv_token = model.layers * math.prod(model.kv_shape(1, 1)) * model.dtype.itemsize
    return StepBytes(model.layer_bytes * ranks + head, kv_token * ranks)


def _measure(section: VerifierConfig, runner: ModelRunner, max_context: int) -> StepCurve:
    """What steps cost on this machine."""
    sequences = section.max_running_sequences
    limits = StepLimits(
        rows=min(256, sequences * (1 + section.max_draft_nodes), max_context - 1),
        sequences=sequences,
        kv_blocks=section.kv_blocks,
        block_tokens=section.kv_block_tokens,
        max_context=max_context,
        capacities=runner.static.row_capacities if runner.static else (),
    )
    started = time.perf_counter()
    curve = measure_steps(timed_steps(runner, limits), limits, section.warm_up_seconds)
    points = ", ".join(f"{r}: {s * 1e3:.1f}" for r, s in zip(curve.rows, curve.seconds, strict=True))
    logger.info("measured steps in %.1fs; ms by rows: %s", time.perf_counter() - started, points)
    return curve


def _end_anyway(lost: RankLost) -> None:
    """A thread that hangs in a collective, or loads, cannot be ended in order."""
    logger.critical("rank %d is gone: %s; the verifier cannot go on", lost.rank, lost.reason)
    timer = threading.Timer(_END_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


async def _drain(engine: Engine, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        load = engine.load()
        if load.running + load.waiting == 0:
            return
        await asyncio.sleep(0.05)
