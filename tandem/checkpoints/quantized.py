"""Quantised weights as published checkpoints store them, and what their quantization_config may say.

Which form a weight has is told by its tensors, not by the config's lists of layers (a wrapper's names differ from
theirs); the config is held to the scheme that the tensors are then read by. Sources: transformers' finegrained_fp8,
compressed-tensors' pack_quantized.
"""

from collections.abc import Iterable
from typing import Any

import torch

from tandem.checkpoints.folder import FLOATS, INTEGERS, CheckpointFolder
from tandem.checkpoints.gguf_blocks import METHOD as GGUF_BLOCKS
from tandem.errors import StartupError
from tandem.layers.fp8_linear import BLOCK, Fp8Linear
from tandem.layers.int4_linear import GROUP, Int4Linear

FP8 = "fp8"
INT4 = "compressed-tensors"
"""Their quant_method."""

_WORD = 8
"""Columns in a 32-bit word of an INT4 weight."""


def fp8_linear(
    folder: CheckpointFolder, weights: Iterable[tuple[str, int, range]], in_features: int, columns: range
) -> Fp8Linear:
    """weights: (name without `.weight`, out, rows wanted) of each, put one after another."""
    values, scales = [], []
    for name, out, rows in weights:
        part = _block(folder, f"{name}.weight", (out, in_features), ("F8_E4M3",), rows, columns)
        values.append(part.view(torch.uint8))
        grid = (_up(out, BLOCK), _up(in_features, BLOCK))
        scale = folder.part(f"{name}.weight_scale_inv", grid, (*FLOATS, "F8_E8M0")).float()
        row_block = torch.arange(rows.start, rows.stop) // BLOCK
        scales.append(scale[row_block, columns.start // BLOCK : _up(columns.stop, BLOCK)])
    return Fp8Linear(torch.cat(values).view(torch.float8_e4m3fn), torch.cat(scales), columns.start % BLOCK)


def int4_linear(
    folder: CheckpointFolder, weights: Iterable[tuple[str, int, range]], in_features: int, columns: range
) -> Int4Linear:
    """As fp8_linear."""
    values, scales = [], []
    for name, out, rows in weights:
        for size in (in_features, columns.start, columns.stop):
            if size % GROUP:
                raise StartupError(
                    f"{folder.path}: tensor {name}.weight_packed: columns {columns.start} to {columns.stop} of "
                    f"{in_features} must be multiples of {GROUP}, as its scales are"
                )
        _check_shape(folder, name, (out, in_features))
        words = range(columns.start // _WORD, columns.stop // _WORD)
        part = _block(folder, f"{name}.weight_packed", (out, in_features // _WORD), ("I32",), rows, words)
        values.append(part.view(torch.uint8))
        groups = range(columns.start // GROUP, columns.stop // GROUP)
        scales.append(_block(folder, f"{name}.weight_scale", (out, in_features // GROUP), FLOATS, rows, groups))
    return Int4Linear(torch.cat(values), torch.cat(scales))


def _block(
    folder: CheckpointFolder, name: str, shape: tuple[int, int], kinds: tuple[str, ...], rows: range, columns: range
) -> torch.Tensor:
    if len(columns) == shape[1]:
        return folder.part(name, shape, kinds, 0, rows)
    return folder.part(name, shape, kinds, 1, columns)[rows.start : rows.stop]


def _check_shape(folder: CheckpointFolder, name: str, shape: tuple[int, int]) -> None:
    said = folder.part(f"{name}.weight_shape", (2,), INTEGERS).tolist()
    if said != list(shape):
        raise StartupError(f"{folder.path}: tensor {name}.weight_shape says {said}, config.json means {list(shape)}")


def _up(size: int, step: int) -> int:
    return -(-size // step)


def quantization_method(folder: CheckpointFolder) -> str | None:
    """FP8, INT4 or None, from quantization_config of config.json, at the top level or in text_config. A GGUF's blocks
    are None: the folder gives them out as plain tensors.

    StartupError naming the key, its value and what is supported for any other scheme.
    """
    found = None
    for path, holder in (("", folder.config), ("text_config.", folder.config.get("text_config") or {})):
        config = holder.get("quantization_config")
        if config is not None:
            found = _method(config, f"{folder.path / 'config.json'}: {path}quantization_config.")
    return found


def _method(config: dict[str, Any], where: str) -> str | None:
    _allow(where, config, "quant_method", FP8, INT4, GGUF_BLOCKS)
    if config["quant_method"] == GGUF_BLOCKS:
        return None
    if config["quant_method"] == FP8:
        _allow(where, config, "fmt", "e4m3", None)
        _allow(where, config, "weight_block_size", [BLOCK, BLOCK])
        _allow(where, config, "activation_scheme", "dynamic", None)
        return FP8
    _allow(where, config, "format", "pack-quantized")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        _allow(where, config, key, None, {})
    groups = config.get("config_groups") or {}
    if not groups:
        raise StartupError(f"{where}config_groups: missing")
    for name, group in groups.items():
        inside = f"{where}config_groups.{name}."
        _allow(inside, group, "format", "pack-quantized", None)
        for key in ("input_activations", "output_activations"):
            _allow(inside, group, key, None)
        weights = group.get("weights") or {}
        inside += "weights."
        for key, *supported in (
            ("type", "int"),
            ("num_bits", 4),
            ("strategy", "group"),
            ("group_size", GROUP),
            ("symmetric", True),
            ("actorder", None, False),
            ("dynamic", False, None),
            ("block_structure", None),
        ):
            _allow(inside, weights, key, *supported)
    return INT4


def _allow(where: str, config: dict[str, Any], key: str, *supported: object) -> None:
    value = config.get(key)
    if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in supported):
        said = " or ".join("nothing" if allowed is None else repr(allowed) for allowed in supported)
        raise StartupError(f"{where}{key}: {value!r} is not supported; supported: {said}")
