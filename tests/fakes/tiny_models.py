"""Tiny target and draft folders that say what a test wants, made in milliseconds.

Map target: greedy output follows any successor function, so any text, stop or end of sequence can be forced. Constant
draft model: every draft is the same token, so inside that token's own loop every draft is accepted whole and elsewhere
every draft is rejected whole.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 512
HIDDEN = 128


def _llama_json(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        **changes,
    }


def random_target(folder: Path, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama in fp32, saved; returns transformers' model of it, the oracle. Its logit gaps suit argmax."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
            "initializer_range": 0.08,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **changes,
        }
    )
    model = LlamaForCausalLM(config).eval().float()
    model.save_pretrained(folder)
    return model


def map_target(folder: Path, successor: Sequence[int], scale: float = 1.0, **changes: Any) -> Path:
    """A target whose greedy next token is successor[last token]. scale < 1 flattens the distribution."""
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = torch.zeros(VOCAB, HIDDEN).index_add_(0, torch.tensor(successor), embed) * scale
    config = _llama_json(**changes)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, inner = HIDDEN // heads, config["intermediate_size"]
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        shapes = {
            "self_attn.q_proj": (heads * head_dim, HIDDEN),
            "self_attn.k_proj": (kv_heads * head_dim, HIDDEN),
            "self_attn.v_proj": (kv_heads * head_dim, HIDDEN),
            "mlp.gate_proj": (inner, HIDDEN),
            "mlp.up_proj": (inner, HIDDEN),
        }
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = torch.randn(shape, generator=generator) * 0.1
        tensors[f"{prefix}self_attn.o_proj.weight"] = torch.zeros(HIDDEN, heads * head_dim)
        tensors[f"{prefix}mlp.down_proj.weight"] = torch.zeros(HIDDEN, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN)
    return _write(folder, config, tensors)


def constant_draft(folder: Path, mask_token: int, **changes: Any) -> Path:
    """A draft model that proposes successor[mask_token] of its map target in every slot."""
    heads, kv_heads, head_dim, inner, taps = 4, 2, 32, 64, [0, 1]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": taps},
        "num_target_layers": 2,
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "layer_types": ["full_attention"],
        "vocab_size": VOCAB,
        **changes,
    }
    generator = torch.Generator().manual_seed(1)
    layer = {
        "self_attn.q_proj": (heads * head_dim, HIDDEN),
        "self_attn.k_proj": (kv_heads * head_dim, HIDDEN),
        "self_attn.v_proj": (kv_heads * head_dim, HIDDEN),
        "mlp.gate_proj": (inner, HIDDEN),
        "mlp.up_proj": (inner, HIDDEN),
    }
    tensors = {f"layers.0.{n}.weight": torch.randn(s, generator=generator) * 0.1 for n, s in layer.items()}
    tensors |= {
        "layers.0.self_attn.o_proj.weight": torch.zeros(HIDDEN, heads * head_dim),
        "layers.0.mlp.down_proj.weight": torch.zeros(HIDDEN, inner),
        "layers.0.self_attn.q_norm.weight": torch.ones(head_dim),
        "layers.0.self_attn.k_norm.weight": torch.ones(head_dim),
        "layers.0.input_layernorm.weight": torch.ones(HIDDEN),
        "layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "fc.weight": torch.randn(HIDDEN, len(taps) * HIDDEN, generator=generator) * 0.1,
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    return _write(folder, config, tensors)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
