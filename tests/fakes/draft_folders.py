"""Tiny draft model folders with random weights, and what a drafter reads of their targets, in the published formats."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, TARGET_LAYERS = 512, 64, 10
FULL_ATTENTION = {"layer_types": ["full_attention"] * 3, "sliding_window": None, "use_sliding_window": False}
"""Changes that make all layers see everything."""


def draft_config(**changes: Any) -> dict[str, Any]:
    """A config.json of 3 full-attention layers, 2 query heads per key head; a key changed to ... is left out."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": 8,
        "dflash_config": {"mask_token_id": 500, "target_layer_ids": [1, 4, 7]},
        "num_target_layers": TARGET_LAYERS,
        "num_hidden_layers": 3,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "layer_types": ["full_attention"] * 3,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def dflash2_config(inner: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A DFlash2 config.json as published ones are, tiny; `inner` changes dflash_config, again with ... for absent."""
    dflash_config = {
        "block_size": 8,
        "mask_token_id": 500,
        "target_layer_ids": [1, 4, 7],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 12,
        "selector_top_k": 6,
    }
    dflash_config = {key: value for key, value in (dflash_config | (inner or {})).items() if value is not ...}
    return draft_config(
        **{
            "architectures": ["DFlash2DraftModel"],
            "block_size": ...,
            "is_causal": False,
            "layer_types": ["sliding_attention"] * 3,
            "sliding_window": 24,
            "use_sliding_window": True,
            "dflash_config": dflash_config,
            **changes,
        }
    )


def draft_tensors(config: dict[str, Any], taps: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights that let context, block and MLP all matter."""
    generator = torch.Generator().manual_seed(seed)

    def weight(out: int, into: int) -> torch.Tensor:
        return torch.randn(out, into, generator=generator) * 1.5 / into**0.5

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tensors = {"fc.weight": weight(hidden, taps * hidden), "hidden_norm.weight": norm(hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}."
        for name, out, into in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key, hidden),
            ("self_attn.v_proj", key, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{layer}{name}.weight"] = weight(out, into)
            if config.get("attention_bias") and "self_attn" in name:
                tensors[f"{layer}{name}.bias"] = torch.randn(out, generator=generator)
        for name, width in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            tensors[f"{layer}{name}.weight"] = norm(width)
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}self_attn.{name}.weight"] = norm(head_dim)
    tensors["norm.weight"] = norm(hidden)
    if config["architectures"] == ["DFlash2DraftModel"]:
        dflash2 = config | config.get("dflash_config", {})
        kernel_size, groups = dflash2["conv_kernel_size"], hidden // dflash2["conv_group_size"]
        for i in range(config["num_hidden_layers"]):
            for conv in ("attention_conv", "mlp_conv"):
                tensors[f"layers.{i}.{conv}.base_kernel"] = (
                    torch.randn(2, kernel_size, hidden, generator=generator) * 0.7
                )
                tensors[f"layers.{i}.{conv}.kernel_projection.weight"] = weight(2 * kernel_size * groups, hidden) * 0.3
        rank = dflash2["selector_rank"]
        for codebook in ("predecessor_codebook", "successor_codebook"):
            codes = torch.randn(config["vocab_size"], rank, generator=generator)
            tensors[f"candidate_selector.{codebook}"] = codes
        tensors["candidate_selector.hidden_projection.weight"] = weight(rank, hidden)
    return tensors


def write_draft(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A DFlash folder."""
    return _write(folder, config, tensors)


def write_target(folder: Path, tied: bool = True, seed: int = 1, **changes: Any) -> Path:
    """What a drafter reads of a target's folder: config.json, embedding and, unless tied, head."""
    generator = torch.Generator().manual_seed(seed)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": TARGET_LAYERS,
        "tie_word_embeddings": tied,
    }
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator)}
    if not tied:
        tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
    return _write(folder, config | changes, tensors)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
