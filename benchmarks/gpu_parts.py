"""What benchmarks/gpu_check.py measures, part by part; each part hands its rows out as they are measured."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.device_time import copy_ceiling, seconds_per_pass
from benchmarks.random_weights import KIMI_K2_4_LAYERS, QWEN3_8B, RandomFolder, tiny
from benchmarks.verify_cost import Cell, blocks_of, segments_of
from tandem.graphs import driver_for
from tandem.kernels.expert_stack import ExpertStack, StackedLinears
from tandem.kernels.fused_moe import fused_moe
from tandem.kernels.paged_attention import paged_attention, rows_per_tile
from tandem.kernels.step_tables import StepTables
from verifier_service.buckets import BucketLimits
from verifier_service.model_runner import ModelRunner
from verifier_service.models.decoder import DecoderModel
from verifier_service.models.loading import load_model
from verifier_service.static_step import StaticPlan
from verifier_service.step import SegmentRows

Row = dict[str, Any]

BATCHES = (1, 8, 32)
NODES = (0, 8, 16, 32, 64)
BLOCK_TOKENS = 32
VERIFY_CONTEXT = 1024
ATTENTION_CONTEXT = 8192
COPY_BYTES = 2 * 2**30
COLD_BYTES = 2**30
"""Read before the same memory is read again: far more than a GPU's cache holds."""


@dataclass(frozen=True)
class Where:
    """What the parts run on."""

    device: torch.device
    tiny: bool
    """Sizes that prove the script on a CPU; their figures mean nothing."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def batches(self) -> tuple[int, ...]:
        return (1, 2) if self.tiny else BATCHES

    @property
    def nodes(self) -> tuple[int, ...]:
        return (0, 8) if self.tiny else NODES


def verify_qwen3_8b(where: Where) -> Iterator[Row]:
    """Verify steps of a dense target with GQA."""
    yield from _verify(QWEN3_8B, where)


def verify_kimi_k2(where: Where) -> Iterator[Row]:
    """Verify steps of 4 layers with MLA and INT4 experts."""
    yield from _verify(KIMI_K2_4_LAYERS, where)


def attention(where: Where) -> Iterator[Row]:
    """Bandwidth of the attention kernel over long prefixes, against a copy's."""
    ceiling = copy_ceiling(where.device, 2**20 if where.tiny else COPY_BYTES)
    shapes = {"Qwen3-8B": (32, 8, 128, 128), "Kimi K2 (MLA)": (64, 1, 576, 512)}
    if where.tiny:
        shapes = {"tiny GQA": (4, 2, 32, 32), "tiny MLA": (4, 1, 48, 32)}
    for name, (heads, kv_heads, key_dim, value_dim) in shapes.items():
        for batch in where.batches:
            for nodes in (0, 7, 31) if not where.tiny else (0, 7):
                yield _attention(where, name, heads, kv_heads, key_dim, value_dim, batch, nodes) | _by(ceiling)


def mixture(where: Where) -> Iterator[Row]:
    """Bandwidth of the fused mixture over the weights of the experts it wakes, against a copy's."""
    ceiling = copy_ceiling(where.device, 2**20 if where.tiny else COPY_BYTES)
    shapes = {
        "Kimi K2, INT4": (384, 8, 7168, 2048, True),
        "Qwen3-30B-A3B, bf16": (128, 8, 2048, 768, False),
    }
    if where.tiny:
        shapes = {"tiny INT4": (8, 2, 128, 64, True), "tiny bf16": (8, 2, 128, 64, False)}
    for name, (count, chosen, hidden, inner, int4) in shapes.items():
        stack = _experts(where, count, hidden, inner, int4)
        for rows in (1, 4) if where.tiny else (1, 8, 33, 64, 256):
            yield _mixture(where, name, stack, chosen, hidden, rows) | _by(ceiling)
        del stack


PARTS: dict[str, Callable[[Where], Iterator[Row]]] = {
    "attention": attention,
    "mixture": mixture,
    "verify-qwen3-8b": verify_qwen3_8b,
    "verify-kimi-k2": verify_kimi_k2,
}
"""In the order they run: what is short and least depends on the rest comes first."""


def _verify(config: dict[str, Any], where: Where) -> Iterator[Row]:
    started = time.perf_counter()
    config = tiny(config) if where.tiny else config
    context = 48 if where.tiny else VERIFY_CONTEXT
    model = load_model(RandomFolder(config, where.device), where.dtype, where.device)
    cells = [Cell(1 + nodes, batch, context) for nodes in where.nodes for batch in where.batches]
    blocks = 1 + max(cell.sequences * blocks_of(cell, BLOCK_TOKENS) for cell in cells)
    driver = driver_for(where.device)
    limits = BucketLimits(
        rows=max(c.sequences * c.rows_per_sequence for c in cells),
        sequences=max(where.batches),
        nodes=max(where.nodes),
        context=context + 1 + max(where.nodes),
    )
    plan = StaticPlan(limits, driver, eager_fallback=True, together=False)
    runner = ModelRunner(model, None, blocks, BLOCK_TOKENS, where.device, static=plan)
    loaded = time.perf_counter()
    runner.capture()
    buckets = runner.buckets()
    yield {
        "what": "start",
        "load_s": loaded - started,
        "capture_s": time.perf_counter() - loaded,
        "buckets": len(buckets),
        "captured": sum(bucket.captured for bucket in buckets),
        "why_not": sorted({bucket.why for bucket in buckets if bucket.why}),
    }
    ceiling = copy_ceiling(where.device, 2**20 if where.tiny else COPY_BYTES)
    rng = random.Random(0)
    for cell in cells:
        yield _verify_cell(runner, model, cell, rng, where) | _by(ceiling)


def _verify_cell(runner: ModelRunner, model: DecoderModel, cell: Cell, rng: random.Random, where: Where) -> Row:
    """Eager and captured steps over the same rows, in turn. Bandwidth: what a step cannot do without reading (weights,
    those of the experts it wakes, KV), over the captured step's time."""
    static = runner.static
    segments = segments_of(cell, BLOCK_TOKENS, model.vocab_size, rng, tree=True)
    times: dict[str, list[float]] = {"eager": [], "captured": []}
    for repeat in range(4 if where.tiny else 12):
        for name, seconds in times.items():
            runner.static = static if name == "captured" else None
            started = time.perf_counter()
            result = runner.run(segments)
            if repeat >= 2:
                seconds.append((time.perf_counter() - started) * 1e3)
    runner.static = static
    eager, captured = (statistics.median(seconds) for seconds in times.values())
    of_token = model.layers * math.prod(model.kv_shape(1, 1)) * model.dtype.itemsize
    read = model.layer_bytes + model.head_bytes + of_token * cell.sequences * (cell.context + cell.rows_per_sequence)
    if result.routing is not None:
        read += sum(
            size * len(set(chosen.flatten().tolist()))
            for size, chosen in zip(model.expert_bytes, result.routing, strict=True)
        )
    return {
        "what": "verify",
        "batch": cell.sequences,
        "nodes": cell.rows_per_sequence - 1,
        "rows": cell.sequences * cell.rows_per_sequence,
        "bucket_rows": result.rows,
        "replayed": result.replay_seconds is not None,
        "eager_ms": eager,
        "captured_ms": captured,
        "eager_by_captured": eager / captured,
        "gb_per_s": read / captured / 1e6,
    }


def _attention(
    where: Where, name: str, heads: int, kv_heads: int, key_dim: int, value_dim: int, batch: int, nodes: int
) -> Row:
    """Layer after layer of as many pools as it takes to find none of them in the cache."""
    context = 64 if where.tiny else ATTENTION_CONTEXT
    latent = key_dim != value_dim
    of_token = (1, 1, key_dim) if latent else (2, kv_heads, key_dim)
    blocks = -(-(context + 1 + nodes) // BLOCK_TOKENS)
    prefix_bytes = batch * context * of_token[0] * of_token[1] * key_dim * where.dtype.itemsize
    layers = 1 if where.tiny else max(1, -(-COLD_BYTES // prefix_bytes))
    shape = (layers, batch * blocks + 1, BLOCK_TOKENS, *of_token)
    kv = torch.randn(shape, dtype=where.dtype, device=where.device)
    parents = [-1, *((i - 1) // 2 for i in range(1, nodes + 1))]
    sequences = [
        SegmentRows(s, context, [0] * (1 + nodes), parents, list(range(1 + s * blocks, 1 + (s + 1) * blocks)))
        for s in range(batch)
    ]
    rows = batch * (1 + nodes)
    words = max(1, -(-(1 + nodes) // 32))
    tables = StepTables.allocate(rows, batch, blocks, words, rows_per_tile(heads // kv_heads), where.device)
    tables.write(sequences)
    q = torch.randn(rows, heads, key_dim, dtype=where.dtype, device=where.device)

    def all_layers() -> None:
        for layer in kv:
            paged_attention(q, layer, tables, key_dim**-0.5, value_dim)

    seconds = seconds_per_pass(all_layers, where.device) / layers
    return {
        "what": name,
        "batch": batch,
        "nodes": nodes,
        "context": context,
        "us": seconds * 1e6,
        "gb_per_s": prefix_bytes / seconds / 1e9,
    }


def _experts(where: Where, count: int, hidden: int, inner: int, int4: bool) -> ExpertStack:
    def linears(out: int, columns: int) -> StackedLinears:
        if not int4:
            values = torch.randn(count, out, columns, dtype=where.dtype, device=where.device).mul_(0.02)
            return StackedLinears(values)
        packed = torch.randint(0, 256, (count, out, columns // 2), dtype=torch.uint8, device=where.device)
        scale = torch.full((count, out, columns // 32), 0.004, dtype=where.dtype, device=where.device)
        return StackedLinears(packed, scale)

    return ExpertStack(linears(2 * inner, hidden), linears(hidden, inner))


def _mixture(where: Where, name: str, stack: ExpertStack, chosen: int, hidden: int, rows: int) -> Row:
    """Passes follow each other over other experts each time, so that the cache holds none of them."""
    passes = 1 if where.tiny else 8
    x = torch.randn(rows, hidden, dtype=where.dtype, device=where.device)
    weights = torch.full((rows, chosen), 1 / chosen, device=where.device)
    every = [torch.rand(rows, stack.count, device=where.device).topk(chosen).indices for _ in range(passes)]
    woken = sum(len(places.unique()) for places in every) / passes

    def all_passes() -> None:
        for places in every:
            fused_moe(x, stack, weights, places)

    seconds = seconds_per_pass(all_passes, where.device) / passes
    return {
        "what": name,
        "rows": rows,
        "experts": woken,
        "us": seconds * 1e6,
        "gb_per_s": woken * stack.nbytes / stack.count / seconds / 1e9,
    }


def _by(ceiling: float) -> Row:
    return {"copy_gb_per_s": ceiling / 1e9}
