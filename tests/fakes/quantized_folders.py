"""Dense model folders turned into the published quantised forms, with what the quantised weights stand for beside them.

Written in numpy from the formats' descriptions, so that it can serve as an oracle of the reader.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
}
"""As Kimi K2.5's file has them."""


def fp8_weight(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """DeepSeek's form of a weight [out, in], by suffix, and the fp32 values it stands for."""
    values = weight.float().numpy()
    out, columns = values.shape
    scale = np.empty((-(-out // 128), -(-columns // 128)), np.float32)
    whole = np.empty_like(values)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            scale[i, j] = max(np.abs(values[block]).max(), 1e-12) / 448
            whole[block] = scale[i, j]
    stored = torch.from_numpy(values / whole).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": torch.from_numpy(scale)}, stored.float() * torch.from_numpy(whole)


def int4_weight(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Kimi's form of a weight [out, in], by suffix, and the fp32 values it stands for. in: a multiple of 32."""
    out, columns = weight.shape
    groups = weight.float().numpy().reshape(out, columns // 32, 32)
    scale = torch.from_numpy(np.maximum(np.abs(groups).max(-1), 1e-12) / 7).bfloat16()
    each = scale.float().numpy()[:, :, None]
    levels = np.clip(np.round(groups / each), -8, 7).astype(np.int64)
    words = np.zeros((out, columns // 8), np.uint32)
    for place, column in enumerate(np.moveaxis((levels + 8).reshape(out, -1, 8), -1, 0)):
        words |= column.astype(np.uint32) << np.uint32(4 * place)
    stored = {
        "weight_packed": torch.from_numpy(words.view(np.int32)),
        "weight_scale": scale,
        "weight_shape": torch.tensor([out, columns], dtype=torch.int32),
    }
    return stored, torch.from_numpy((levels * each).astype(np.float32).reshape(out, columns))


def to_fp8(folder: Path, reference: Path, chosen: Callable[[str], bool]) -> None:
    """Store the weights whose names are `chosen` in FP8; `reference` becomes a dense copy with the values they stand
    for. The folder holds one model.safetensors."""
    _quantize(folder, reference, chosen, fp8_weight, FP8_CONFIG)


def to_int4(folder: Path, reference: Path, chosen: Callable[[str], bool]) -> None:
    """As to_fp8, in INT4."""
    _quantize(folder, reference, chosen, int4_weight, INT4_CONFIG)


def _quantize(
    folder: Path,
    reference: Path,
    chosen: Callable[[str], bool],
    quantize: Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]],
    quantization_config: dict[str, Any],
) -> None:
    shutil.copytree(folder, reference)
    stored: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        dense[name] = stored[name] = tensor
        if chosen(name):
            tensors, dense[name] = quantize(stored.pop(name))
            stored |= {name.removesuffix("weight") + suffix: part for suffix, part in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(dense, reference / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))
