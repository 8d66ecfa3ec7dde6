"""Sparse upcycling (Komatsuzaki et al., 2022): a mixture of experts made of a dense Llama, each a copy of its MLP.

The result is a MixtralForCausalLM: its attention is Llama's, and its router's weights, normalised over the chosen
experts, add up to 1, so whatever the router chooses, outputs equal the dense model's up to rounding. It is a mixture to
test and show serving with, not a better model.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tandem.checkpoints.folder import CheckpointFolder
from tandem.checkpoints.gguf_convert import Progress, llama_shapes
from tandem.checkpoints.model_json import read_json
from tandem.errors import StartupError

INDEX = "model.safetensors.index.json"

_EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "LICENSE",
)
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SHARD_BYTES = 256 * 2**20
_ROUTER_STD = 0.02
"""As weights are usually initialised. Which experts a token gets does not depend on it."""


@dataclass(frozen=True)
class Upcycling:
    """What to make."""

    experts: int
    experts_per_token: int = 2
    seed: int = 0
    """Of the router's weights."""

    def check(self) -> None:
        """StartupError if there can be no such mixture."""
        if self.experts < 2:
            raise StartupError(f"a mixture has at least 2 experts, not {self.experts}")
        if not 1 <= self.experts_per_token <= self.experts:
            raise StartupError(f"experts per token must be in [1, {self.experts}], is {self.experts_per_token}")


def is_upcycled(folder: Path, wanted: Upcycling) -> bool:
    """Whether `folder` already holds a mixture of this form; StartupError if it holds one of another."""
    if not (folder / INDEX).is_file():
        return False
    config = read_json(folder / "config.json")
    for key, number in (("num_local_experts", wanted.experts), ("num_experts_per_tok", wanted.experts_per_token)):
        if config.get(key) != number:
            raise StartupError(
                f"{folder}: holds a model with {key} {config.get(key)}, not {number}; "
                "remove it or choose another --output"
            )
    return True


def upcycle(source: Path, output: Path, wanted: Upcycling, progress: Progress) -> None:
    """Write a mixture made of the Llama in `source` to `output`, which appears whole or not at all.

    Weights keep their dtype. StartupError names the file and the key or tensor that is wrong, missing or not supported.
    """
    wanted.check()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise StartupError(f"{output}: exists and is not an upcycled model; remove it or choose another --output")
    dense = CheckpointFolder(source)
    llama = _llama_config(dense.config, source / "config.json")
    entries = list(_entries(dense, llama, wanted))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    try:
        _write_shards(partial, dense, entries, wanted.seed, progress)
        _write_json(partial / "config.json", _mixture_config(llama, wanted))
        (partial / "README.md").write_text(_readme(source, wanted))
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        partial.chmod(0o755)  # mkdtemp makes what only the owner can read
        partial.rename(output)
    except OSError as error:
        raise StartupError(f"{output}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _llama_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The dense model's configuration with what its file may leave out: Mixtral's defaults are others than Llama's."""
    for key, allowed in {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "quantization_config": None,
    }.items():
        if config.get(key, allowed) != allowed:
            raise StartupError(f"{path}: {key} {config[key]!r} cannot be upcycled, only {allowed!r}")
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(config.get(key), int):
            raise StartupError(f"{path}: {key} must be an integer, is {config.get(key)!r}")
    heads = config["num_attention_heads"]
    return config | {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        **({} if "rope_parameters" in config else {"rope_theta": config.get("rope_theta", 10000.0)}),
    }


def _mixture_config(llama: dict[str, Any], wanted: Upcycling) -> dict[str, Any]:
    dropped = ("attention_bias", "mlp_bias", "pretraining_tp")
    return {key: value for key, value in llama.items() if key not in dropped} | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "sliding_window": None,
        "num_local_experts": wanted.experts,
        "num_experts_per_tok": wanted.experts_per_token,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


@dataclass(frozen=True)
class _Entry:
    """One tensor of the mixture."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str | None
    """The dense tensor it is a copy of; None for a router."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _entries(dense: CheckpointFolder, llama: dict[str, Any], wanted: Upcycling) -> Iterator[_Entry]:
    """All tensors, layer by layer."""
    for source, shape in llama_shapes(llama).items():
        stem, _, part = source.removesuffix(".weight").partition(".mlp.")
        dtype = _dtype(dense, source)
        if not part:
            yield _Entry(source, shape, dtype, source)
            continue
        if part == "gate_proj":
            router = f"{stem}.block_sparse_moe.gate.weight"
            yield _Entry(router, (wanted.experts, llama["hidden_size"]), dtype, None)
        for expert in range(wanted.experts):
            yield _Entry(f"{stem}.block_sparse_moe.experts.{expert}.{_EXPERT_NAMES[part]}.weight", shape, dtype, source)


def _dtype(dense: CheckpointFolder, name: str) -> torch.dtype:
    kind = dense.kind(name)
    if kind not in _DTYPES:
        raise StartupError(f"{dense.path}: tensor {name} is stored as {kind}; supported: {', '.join(_DTYPES)}")
    return _DTYPES[kind]


def _write_shards(folder: Path, dense: CheckpointFolder, entries: list[_Entry], seed: int, progress: Progress) -> None:
    """Files of at most _SHARD_BYTES, and their index. One file's tensors are in memory at a time."""
    random = torch.Generator().manual_seed(seed)

    def value(entry: _Entry) -> torch.Tensor:
        if entry.source is not None:
            return dense.tensor(entry.source, entry.shape, entry.dtype)
        return torch.randn(entry.shape, generator=random).mul(_ROUTER_STD).to(entry.dtype)

    shards: list[list[_Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e.bytes for e in shards[-1]) + entry.bytes > _SHARD_BYTES:
            shards.append([])
        shards[-1].append(entry)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        progress(f"writing {file}", number - 1, len(shards))
        save_file({entry.name: value(entry) for entry in shard}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors makes what only the owner can read
        weight_map |= {entry.name: file for entry in shard}
    total = sum(entry.bytes for entry in entries)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _readme(source: Path, wanted: Upcycling) -> str:
    return f"""# {source.name}, upcycled

A mixture of {wanted.experts} experts, {wanted.experts_per_token} per token, made of {source.name} by `tandem models
prepare --upcycle-experts {wanted.experts}`: every expert is a copy of the dense MLP, the router is random (seed
{wanted.seed}). Its outputs are the dense model's up to rounding: it shows serving over expert-parallel ranks and is no
better a model. Licence and origin: the dense model's.
"""


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
