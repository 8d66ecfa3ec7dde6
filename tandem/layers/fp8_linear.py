"""Linear layers whose weight stays in 8-bit floats with a scale per block of 128 by 128."""

import torch

from tandem.layers.linear import linear_by_tiles

BLOCK = 128


class Fp8Linear:
    """y = x W^T, with W[i, j] = value[i, j] * scale[i, block of j], in fp32, rounded to x's dtype before the product.

    Each row has its own scales: rows of several weights, or any part of one, then need no common grid, for 3 % more
    memory. The reference of the GPU kernels, and what a CPU runs: W exists one tile of rows at a time.
    """

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, first_column: int = 0):
        """values: [out, in] float8_e4m3fn. scale: [out, blocks] fp32. first_column: where in the first block the
        columns begin, for a part of a weight that is cut between multiples of 128."""
        self._values = values
        self._scale = scale
        self.first_column = first_column

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self._values.nbytes + self._scale.nbytes

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """values and scale, as given."""
        return self._values, self._scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out]."""
        return linear_by_tiles(x, self._values.shape[0], lambda rows: self._dense(rows, x.dtype))

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T."""
        return residual + self(x)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """W: [out, in]."""
        return self._dense(slice(None), dtype)

    def to(self, device: torch.device) -> "Fp8Linear":
        """The same on another device."""
        return Fp8Linear(self._values.to(device), self._scale.to(device), self.first_column)

    def _dense(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        values = self._values[rows].float()
        first = self.first_column
        scale = self._scale[rows].repeat_interleave(BLOCK, dim=1)[:, first : first + values.shape[1]]
        return values.mul_(scale).to(dtype)
