"""Linear layers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

_PACK_ROWS = 8
"""Row count the packed layout is chosen for: a verify step's, a draft's."""
_TILE_ROWS = 256
"""Of a weight that is made while it is used: a tile stays in the cache, a product has work enough for all threads."""


class Linear:
    """y = x W^T.

    On CPU in bf16 the weight is kept in oneDNN's blocked layout only, so that no call reorders it: measured 20 to 30 %
    faster at 1 to 16 rows, with the same bits as the plain product from 2 rows on.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        """weight: [out, in], bias: [out], both on their device."""
        self.nbytes = weight.nbytes
        """Memory the weight takes."""
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) if self._packed else weight
        self._bias = bias

    @property
    def stored(self) -> tuple[torch.Tensor, None]:
        """The weight as given, which has no scale."""
        return self._weight.to_dense() if self._packed else self._weight, None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out]."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T + b."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return residual + F.linear(x, self._weight, self._bias)


def linear_by_tiles(x: torch.Tensor, out_features: int, weight: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """x W^T for a W that is never whole: weight(rows) makes those rows of it, [rows, in], in x's dtype.

    Packed like any other layer, not for speed but for its bits: the plain fp32 product of a row changes with the number
    of rows beside it up to 16 rows, the packed one does not from 4 on.
    """
    tiles = [slice(i, min(i + _TILE_ROWS, out_features)) for i in range(0, out_features, _TILE_ROWS)]
    return torch.cat([Linear(weight(rows))(x) for rows in tiles], dim=-1)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
