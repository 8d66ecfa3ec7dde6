"""Weights that keep a GGUF's own blocks: groups of 32 columns in 4 or 8 bits with their scale and minimum.

As safetensors hold them, for a weight `X.weight` [out, in]: `X.weight_q4` uint8 [out, in / 2], of a group's byte i the
low nibble column i and the high one column i + 16, `X.weight_scale` and `X.weight_min` fp16 [out, in / 32]; or
`X.weight_q8` int8 [out, in] and `X.weight_scale`. A value is quantised * scale + minimum. These are the blocks of Q4_0
(whose minimum is -8 scales), Q4_1 and Q8_0 in the GGUF specification, taken apart.
"""

from dataclasses import dataclass
from typing import Literal

import torch

METHOD = "gguf-blocks"
"""The quant_method in quantization_config."""
GROUP = 32
Form = Literal["q4", "q8"]
FORMS: tuple[Form, ...] = ("q4", "q8")


@dataclass(frozen=True)
class BlockWeight:
    """A weight [out, in], or rows of it."""

    form: Form
    values: torch.Tensor
    """q4: uint8 [out, in / 2]. q8: int8 [out, in]."""
    scales: torch.Tensor
    """[out, in / 32] fp16."""
    minima: torch.Tensor | None
    """The same, of q4."""

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(t.nbytes for t in (self.values, self.scales, self.minima) if t is not None)

    def dense(self) -> torch.Tensor:
        """[out, in] fp32, the values that gguf's own dequantisation gives."""
        rows = self.values.shape[0]
        if self.form == "q8":
            return (self.values.float().view(rows, -1, GROUP) * self.scales.float()[..., None]).flatten(1)
        assert self.minima is not None
        packed = self.values.view(rows, -1, GROUP // 2)
        nibbles = torch.cat((packed & 0xF, packed >> 4), dim=-1).float()
        return (nibbles.mul_(self.scales.float()[..., None]).add_(self.minima.float()[..., None])).flatten(1)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """As they are stored. name: of the whole weight, X.weight."""
        parts = {f"{name}_{self.form}": self.values, f"{name}_scale": self.scales}
        return parts if self.minima is None else {**parts, f"{name}_min": self.minima}


def round_to_q8(weight: torch.Tensor) -> BlockWeight:
    """weight: [out, in], any float dtype -> the nearest in 8 bits, as Q8_0 has them."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(dim=-1) / 127).half()
    steps = scales.float()[..., None].clamp(min=torch.finfo(torch.half).smallest_normal)
    values = (groups / steps).round().clamp(-127, 127).to(torch.int8)
    return BlockWeight("q8", values.flatten(1), scales, None)
