"""Converts a Llama in a GGUF file (quantised or not) to a Hugging Face folder, with bf16 weights or its own blocks.

Layout of GGUF tensors and metadata: the GGUF specification and llama.cpp's converter, which stores the rows of q and k
of a head pairwise interleaved (rotary pairs side by side); Hugging Face keeps the halves apart.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from tandem.checkpoints.gguf_blocks import GROUP, METHOD, BlockWeight
from tandem.checkpoints.gguf_tokenizer import build_tokenizer, special_token_ids, tokenizer_config
from tandem.errors import StartupError

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total)."""

PREPARED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""A folder with these is a prepared model."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTATED = ("q_proj.weight", "k_proj.weight")
_BLOCK_TYPES = {getattr(gguf.GGMLQuantizationType, name) for name in ("Q4_0", "Q4_1", "Q8_0")}


def is_prepared(folder: Path) -> bool:
    """Whether `folder` already holds a converted model."""
    return all((folder / name).is_file() for name in PREPARED_FILES)


def convert(
    source: Path,
    output: Path,
    sampling: dict[str, Any] | None,
    extra_files: dict[str, str],
    progress: Progress,
    keep_blocks: bool = False,
) -> None:
    """Write `source` as a Hugging Face folder to `output`, which appears whole or not at all.

    keep_blocks: weights in Q4_0, Q4_1 and Q8_0 keep their blocks (gguf_blocks) and so their exact values; others, and
    all without it, are rounded to bf16.

    `sampling` goes into generation_config.json beside the special ids; `extra_files` maps further file names to texts.
    StartupError names the file and the key or tensor that is wrong, missing or not supported.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise StartupError(f"{output}: exists and is not a prepared model; remove it or choose another --output")
    reader = _open(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = _model_config(metadata, [tensor.name for tensor in reader.tensors], str(source))
    tokenizer = build_tokenizer(metadata, str(source))
    if tokenizer.get_vocab_size() != config["vocab_size"]:
        raise StartupError(
            f"{source}: tokenizer.ggml.tokens has {tokenizer.get_vocab_size()} entries, "
            f"llama.vocab_size is {config['vocab_size']}"
        )
    special = {f"{role}_token_id": index for role, index in special_token_ids(metadata).items() if role != "unk"}

    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    try:
        weights = _weights(reader, config, str(source), progress, keep_blocks)
        if keep_blocks:
            config["quantization_config"] = {"quant_method": METHOD, "group_size": GROUP}
        progress("writing model.safetensors", len(weights), len(weights))
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(partial / "tokenizer.json"))
        _write_json(partial / "config.json", config | special)
        _write_json(partial / "tokenizer_config.json", tokenizer_config(metadata, config["max_position_embeddings"]))
        _write_json(partial / "generation_config.json", special | (sampling or {}))
        for name, text in extra_files.items():
            (partial / name).write_text(text)
        partial.chmod(0o755)  # mkdtemp and safetensors make what only the owner can read
        (partial / "model.safetensors").chmod(0o644)
        try:
            partial.rename(output)
        except OSError:
            if not is_prepared(output):  # else another run was faster
                raise
    except OSError as error:
        raise StartupError(f"{output}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _open(source: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(source)
    except OSError as error:
        raise StartupError(f"{source}: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise StartupError(f"{source}: not a complete GGUF file: {error}") from None


def _model_config(metadata: dict[str, Any], tensor_names: list[str], source: str) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM, old-style rope keys as the published SmolLM2 has them."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise StartupError(f"{source}: general.architecture {architecture!r} is not supported, only 'llama'")

    def required(key: str) -> Any:
        if (value := metadata.get(f"llama.{key}")) is None:
            raise StartupError(f"{source}: llama.{key} is missing")
        return value

    hidden, heads = required("embedding_length"), required("attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    for key, allowed in {
        "rope.scaling.type": "none",
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "expert_count": 0,
    }.items():
        if metadata.get(f"llama.{key}", allowed) != allowed:
            raise StartupError(f"{source}: llama.{key} {metadata[f'llama.{key}']!r} is not supported, only {allowed!r}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": metadata.get("llama.vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        "hidden_size": hidden,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": required("context_length"),
        "rms_norm_eps": _shortest(required("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensor_names,
    }


def _weights(
    reader: gguf.GGUFReader, config: dict[str, Any], source: str, progress: Progress, keep_blocks: bool
) -> dict[str, torch.Tensor]:
    """Every tensor under its Hugging Face name, checked against the shapes that `config` means."""
    expected = llama_shapes(config)
    weights: dict[str, torch.Tensor] = {}
    found = set()
    for done, tensor in enumerate(reader.tensors):
        progress(f"dequantising {tensor.name}", done, len(reader.tensors))
        name = _hf_name(tensor.name)
        if name not in expected:
            raise StartupError(f"{source}: tensor {tensor.name} is not supported")
        found.add(name)
        if keep_blocks and tensor.tensor_type in _BLOCK_TYPES:
            weights |= _blocks(tensor, name, expected[name], config["head_dim"], source)
            continue
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise StartupError(
                f"{source}: tensor {tensor.name} has type {tensor.tensor_type.name}, which cannot be dequantised"
            ) from None
        _check_shape(values.shape, expected[name], tensor.name, source)
        if name.endswith(_ROTATED):
            values = _halves_apart(values, config["head_dim"])
        weights[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
    if missing := sorted(expected.keys() - found):
        raise StartupError(f"{source}: tensor {missing[0]} is missing ({len(missing)} in all)")
    return weights


def _blocks(
    tensor: gguf.ReaderTensor, name: str, shape: tuple[int, ...], head_dim: int, source: str
) -> dict[str, torch.Tensor]:
    """The tensor's blocks, taken apart. A block is [scale, minimum of Q4_1, quantised], scale and minimum in fp16."""
    rows, size = tensor.data.shape[0], gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    blocks = np.ascontiguousarray(tensor.data).reshape(rows, -1, size)
    _check_shape((rows, blocks.shape[1] * GROUP), shape, tensor.name, source)
    scales = blocks[..., :2].copy().view(np.float16)[..., 0]
    minima = None
    head = 2
    if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1:
        minima, head = blocks[..., 2:4].copy().view(np.float16)[..., 0], 4
    elif tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0:
        minima = scales * np.float16(-8)
        if not np.array_equal(minima.astype(np.float32), scales.astype(np.float32) * -8):
            raise StartupError(f"{source}: tensor {tensor.name} has a scale beyond what fp16 holds 8 times")
    values = blocks[..., head:].reshape(rows, -1)
    eight_bits = tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0
    parts = [values.view(np.int8) if eight_bits else values, scales, minima]
    if name.endswith(_ROTATED):
        parts = [None if part is None else _halves_apart(part, head_dim) for part in parts]
    tensors = [None if part is None else torch.from_numpy(np.ascontiguousarray(part)) for part in parts]
    assert tensors[0] is not None
    assert tensors[1] is not None
    return BlockWeight("q8" if eight_bits else "q4", tensors[0], tensors[1], tensors[2]).tensors(name)


def _check_shape(shape: tuple[int, ...], expected: tuple[int, ...], name: str, source: str) -> None:
    if tuple(shape) != expected:
        raise StartupError(f"{source}: tensor {name} has shape {list(shape)}, the metadata means {list(expected)}")


def _hf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", index, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{index}.{_LAYER_NAMES[part]}.weight"
    return ""


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a LlamaForCausalLM and its shape."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{part}.weight": shape for part, shape in layer.items()}
    return shapes


def _halves_apart(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """[heads * head_dim, in]: rows of a head from (0, d/2, 1, d/2 + 1, ...) to (0, 1, ..., d - 1)."""
    rows, columns = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _shortest(value: float) -> float:
    """The shortest decimal that is `value` in fp32, in which GGUF stores floats: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
