"""Linear layers whose weight stays in 4-bit integers with a scale per group of 32 columns."""

import torch

from tandem.layers.linear import linear_by_tiles

GROUP = 32


class Int4Linear:
    """y = x W^T, with W[i, j] = (nibble[i, j] - 8) * scale[i, j // 32], in fp32, rounded to x's dtype before the
    product.

    4.5 bits a weight. The reference of the GPU kernels, and what a CPU runs: W exists one tile of rows at a time.
    """

    def __init__(self, packed: torch.Tensor, scale: torch.Tensor):
        """packed: [out, in / 2] uint8, of each byte the low nibble the even column. scale: [out, in / 32] of any
        float dtype."""
        self._packed = packed
        self._scale = scale

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self._packed.nbytes + self._scale.nbytes

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """packed and scale, as given."""
        return self._packed, self._scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out]."""
        return linear_by_tiles(x, self._packed.shape[0], lambda rows: self._dense(rows, x.dtype))

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T."""
        return residual + self(x)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """W: [out, in]."""
        return self._dense(slice(None), dtype)

    def to(self, device: torch.device) -> "Int4Linear":
        """The same on another device."""
        return Int4Linear(self._packed.to(device), self._scale.to(device))

    def _dense(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        packed = self._packed[rows]
        nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).view(packed.shape[0], -1, GROUP)
        values = nibbles.float().sub_(8).mul_(self._scale[rows, :, None].float())
        return values.flatten(1).to(dtype)
