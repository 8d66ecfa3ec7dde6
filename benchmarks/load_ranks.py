"""How much memory a rank takes while it loads its part of a mixture of experts, against the size of that part.

    python -m benchmarks.load_ranks --folder /var/tmp/load-ranks --json load-ranks.json

Writes a Qwen3-MoE of random weights into the folder, loads it as rank 0, 1, ... of 8, each in a process of its own, one
after another or all at once, and deletes the folder. A rank's share is what its part takes in the checkpoint; its peak
is the most memory the process ever held (VmHWM) less what it held before, the mapped pages of files included.
"""

import argparse
import json
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.bench.machine import machine, machine_line, versions

if TYPE_CHECKING:
    import torch

HIDDEN, EXPERT, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 768, 128, 32, 8, 128, 32768
"""Qwen3-30B-A3B's, but for a smaller vocabulary; key heads enough to split over 8."""
RANKS = 8
SHARDS = 8


@dataclass(frozen=True)
class RankLoad:
    """What one rank took. Bytes."""

    rank: int
    share: int
    peak: int
    ratio: float
    seconds: float


class _Absent:
    """The other ranks: loading needs their number only."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size

    def all_reduce(self, x: "torch.Tensor") -> "torch.Tensor":
        raise NotImplementedError

    def gather_columns(self, x: "torch.Tensor") -> "torch.Tensor":
        raise NotImplementedError


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor, in order."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            yield f"{layer}.{name}.weight", (size,)
        for name in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{name}.weight", (HEAD_DIM,)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{layer}.self_attn.{name}_proj.weight", (heads * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{layer}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for e in range(EXPERTS):
            for name, shape in (("gate", (EXPERT, HIDDEN)), ("up", (EXPERT, HIDDEN)), ("down", (HIDDEN, EXPERT))):
                yield f"{layer}.mlp.experts.{e}.{name}_proj.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def write_checkpoint(folder: Path, layers: int) -> int:
    """A random bf16 checkpoint in shards of about equal size; returns its bytes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "moe_intermediate_size": EXPERT,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = list(shapes(layers))
    total = sum(2 * _count(shape) for _, shape in tensors)
    weight_map: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    written = shard = 0
    for name, shape in tensors:
        pending[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
        written += pending[name].nbytes
        if written >= total * (shard + 1) // SHARDS:
            file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
            save_file(pending, folder / file)
            weight_map |= dict.fromkeys(pending, file)
            pending = {}
            shard += 1
            print(f"wrote {file}: {written / 1e9:.1f} of {total / 1e9:.1f} GB", flush=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def load_rank(folder: Path, rank: int, tp: int) -> RankLoad:
    """Load this process's part and look at what it took."""
    import torch

    from tandem.checkpoints.folder import CheckpointFolder
    from tandem.checkpoints.shard import WHOLE, Shard
    from verifier_service.models.loading import load_model
    from verifier_service.parallel.ranks import Parallel

    torch.set_num_threads(1)
    share = 0

    def count(name: str, size: int) -> None:
        nonlocal share
        share += size

    attention = Shard(rank, RANKS) if tp > 1 else WHOLE
    parallel = Parallel(_Absent(rank, RANKS), attention, Shard(rank, RANKS))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is held now
    before = _status("VmRSS")
    started = time.perf_counter()
    model = load_model(CheckpointFolder(folder), torch.bfloat16, torch.device("cpu"), parallel, progress=count)
    seconds = time.perf_counter() - started
    peak = _status("VmHWM") - before
    del model
    return RankLoad(rank, share, peak, round(peak / share, 3), round(seconds, 2))


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def run(folder: Path, layers: int, tp: int, at_once: int) -> dict[str, Any]:
    """Write, load and delete."""
    try:
        size = write_checkpoint(folder, layers)
        context = multiprocessing.get_context("spawn")
        with context.Pool(at_once, maxtasksperchild=1) as pool:
            loads = pool.starmap(load_rank, [(folder, rank, tp) for rank in range(RANKS)], chunksize=1)
    finally:
        shutil.rmtree(folder)
    return {
        "load_ranks": [asdict(load) for load in loads],
        "largest_ratio": max(load.ratio for load in loads),
        "checkpoint_bytes": size,
        "shards": SHARDS,
        "ranks": RANKS,
        "tp": tp,
        "at_once": at_once,
        "machine": machine(),
        "machine_line": machine_line(),
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="to write the checkpoint to; must not exist")
    parser.add_argument("--layers", type=int, default=5, help="of 1.28 GB each")
    parser.add_argument("--tp", type=int, default=1, choices=(1, RANKS), help="ranks that attention is split over")
    parser.add_argument("--at-once", type=int, default=1, help="ranks that load at the same time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} is already there")
    result = run(options.folder, options.layers, options.tp, options.at_once)
    for load in result["load_ranks"]:
        print(
            f"rank {load['rank']}: share {load['share'] / 1e6:.0f} MB, peak {load['peak'] / 1e6:.0f} MB, "
            f"ratio {load['ratio']}, {load['seconds']} s"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
