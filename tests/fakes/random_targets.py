"""Tiny random targets of every architecture, in the form checkpoints are published in, with transformers as the oracle.

Configs after the targets' fact sheet; weights are wide enough for logit gaps that suit argmax, and the router's bias,
which transformers leaves at zero, is not.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
_LLAMA3 = {
    **_GROUPED,
    "num_key_value_heads": 2,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
_QWEN3 = {
    **_GROUPED,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_QWEN3_MOE = {
    **_QWEN3,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_DEEPSEEK = {
    **_COMMON,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {**_YARN, "rope_theta": 1e4, "factor": 40.0},
}
_KIMI = {
    **_DEEPSEEK,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.827,
    "rope_parameters": {**_YARN, "beta_fast": 1.0},
}

_Kind = tuple[type[PreTrainedModel], type, dict[str, Any]]
_KINDS: dict[str, _Kind] = {
    "llama, llama3 rope": (LlamaForCausalLM, LlamaConfig, _LLAMA3),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, _QWEN3),
    "qwen3, tied": (Qwen3ForCausalLM, Qwen3Config, {**_QWEN3, "tie_word_embeddings": True, "num_key_value_heads": 8}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _QWEN3_MOE),
    "qwen3-moe, sparse step, weights as they are": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**_QWEN3_MOE, "norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2},
    ),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {**_GROUPED, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, _DEEPSEEK),
    "deepseek-v3, no q rank, half-split rope, other mscale": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "rope_parameters": {**_YARN, "mscale_all_dim": 0.7},
        },
    ),
    "kimi": (DeepseekV3ForCausalLM, DeepseekV3Config, _KIMI),
}
KINDS = list(_KINDS)
"""What random_architecture makes."""


def random_architecture(folder: Path, kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random target in fp32, saved; returns transformers' model of it."""
    torch.manual_seed(seed)
    network, config, settings = _KINDS[kind]
    model = network(config(**{**settings, **changes})).eval().float()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer))[torch.randperm(len(buffer))])
    model.save_pretrained(folder)
    if kind == "kimi":
        _wrap(folder)
    return model


def _wrap(folder: Path) -> None:
    """Make it what Kimi K2.5 looks like on disk: a multimodal wrapper's text part, RoPE in its old spelling."""
    text = json.loads((folder / "config.json").read_text())
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    text |= {"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    wrapper = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"model_type": "kimi_k25_vision", "hidden_size": 32},
        "media_placeholder_token_id": 500,
    }
    (folder / "config.json").write_text(json.dumps(wrapper))
    file = folder / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    tensors["vision_tower.patch_embed.pos_emb.weight"] = torch.zeros(4, 4, 32)
    tensors["mm_projector.proj.0.weight"] = torch.zeros(128, 128)
    save_file(tensors, file)
