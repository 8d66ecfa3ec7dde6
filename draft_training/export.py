"""A trained network as a published DFlash folder: config.json and model.safetensors in bf16."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draft_training.config import DraftSection


def draft_config_json(draft: DraftSection, target: dict[str, Any]) -> dict[str, Any]:
    """config.json of a draft model for the target with this config.json. Head count, head width, RoPE and vocabulary
    are the target's."""
    layers = draft.num_hidden_layers
    inner: dict[str, Any] = {"mask_token_id": draft.mask_token_id, "target_layer_ids": list(draft.target_layer_ids)}
    heads = target["num_attention_heads"]
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": draft.block_size,
        "dflash_config": inner,
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": layers,
        "hidden_size": target["hidden_size"],
        "intermediate_size": draft.intermediate_size or target["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": target.get("num_key_value_heads") or heads,
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "hidden_act": "silu",
        "rms_norm_eps": target["rms_norm_eps"],
        "max_position_embeddings": target["max_position_embeddings"],
        "max_window_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "vocab_size": target["vocab_size"],
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if target.get("rope_parameters"):
        config["rope_parameters"] = target["rope_parameters"]
    else:
        config |= {"rope_theta": target["rope_theta"], "rope_scaling": target.get("rope_scaling")}
    config |= {key: target[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in target}
    if draft.dflash2:
        config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        inner |= {"block_size": draft.block_size, **draft.dflash2.model_dump()}
    if draft.draft_vocab_size:
        config["draft_vocab_size"] = draft.draft_vocab_size
    return config


def export(
    folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor], draft_tokens: Sequence[int] | None
) -> None:
    """Write the folder: `state` holds the published tensors, draft_tokens is what the rows of a reduced head stand for.
    Files take their names when they are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    config_file, weights_file = folder / "config.json.part", folder / "model.safetensors.part"
    config_file.write_text(json.dumps(config, indent=1) + "\n")
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}
    if draft_tokens is not None:
        tensors["d2t"] = torch.tensor(draft_tokens) - torch.arange(len(draft_tokens))
    save_file(tensors, weights_file, metadata={"format": "pt"})
    # save_file makes a file that only its owner can read.
    weights_file.chmod(config_file.stat().st_mode)
    weights_file.rename(folder / "model.safetensors")
    config_file.rename(folder / "config.json")
