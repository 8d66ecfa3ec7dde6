"""Linear layers in 8-bit integers, for CPUs whose integer products are several times faster than their floats'."""

import torch


class Int8Linear:
    """y = x W^T, with W rounded to 8 bits per output and x per row, symmetrically, summed in 32-bit integers.

    About 0.5 % off the exact product for weights and activations without outliers: good where a small error costs
    nothing but a little acceptance, as in a draft model.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        """weight: [out, in], bias: [out], any float dtype, on CPU."""
        scale = weight.float().abs().amax(dim=1).clamp(min=1e-12) / 127
        self._weight = (weight.float() / scale[:, None]).round().to(torch.int8).t()
        self._scale = scale
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out], in x's dtype."""
        return self._product(x).to(x.dtype)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=1e-12).div_(127)
        rounded = (x / scale).round_().to(torch.int8)
        product = torch.mul(torch._int_mm(rounded, self._weight), scale).mul_(self._scale)
        return product if self._bias is None else product.add_(self._bias)

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T + b."""
        return self._product(x).add_(residual).to(residual.dtype)
