"""Targets of real layer sizes with random weights, made on the device: no files, and no time to read them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.checkpoints.gguf_blocks import BlockWeight

_STD = 0.02
_NIBBLE_STD = 4.6
"""Of a uniform nibble less 8."""

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
KIMI_K2_4_LAYERS: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 16384,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
            }
        },
    },
}
"""One dense layer and three mixtures whose experts are stored in INT4, as Kimi K2.6 has them."""


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """The same architecture in a size that a CPU runs in a moment."""
    small = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1024,
    }
    return config | {key: value for key, value in small.items() if key in config}


class RandomFolder(CheckpointFolder):
    """Holds whatever tensor is asked for: experts in INT4 where the config says so, all else in bf16."""

    def __init__(self, config: dict[str, Any], device: torch.device):
        self.path = Path("random weights")
        self.config = config
        self._device = device
        self._random = torch.Generator(device).manual_seed(0)
        self._int4 = "quantization_config" in config

    def __contains__(self, name: str) -> bool:
        return self._int4 and ".mlp.experts." in name and name.endswith(".weight_packed")

    def part(
        self, name: str, shape: tuple[int, ...], kinds: Sequence[str], dim: int = 0, part: range | None = None
    ) -> torch.Tensor:
        size = list(shape)
        size[dim] = len(part) if part is not None else size[dim]
        if name.endswith(".weight_shape"):
            inner, hidden = self.config["moe_intermediate_size"], self.config["hidden_size"]
            return torch.tensor([hidden, inner] if ".down_proj." in name else [inner, hidden])
        if name.endswith(".weight_packed"):
            bound = 2**31
            return torch.randint(-bound, bound, size, dtype=torch.int32, device=self._device, generator=self._random)
        if name.endswith(".weight_scale"):
            return torch.full(size, _STD / _NIBBLE_STD, dtype=torch.bfloat16, device=self._device)
        if "norm" in name:
            return torch.ones(size, dtype=torch.bfloat16, device=self._device)
        values = torch.randn(size, dtype=torch.bfloat16, device=self._device, generator=self._random)
        return values.mul_(_STD)

    def kind(self, name: str) -> str:
        return "BF16"

    def blocks(self, name: str, shape: tuple[int, int]) -> BlockWeight | None:
        return None

    def release(self) -> None: ...

    def skip(self, *names: str) -> None: ...

    def check_all_read(self, ignore_suffixes: tuple[str, ...] = ()) -> None: ...
