"""How many rows a linear layer needs for a row's bits not to depend on the others."""

import torch
import torch.nn.functional as F

MIN_ROWS = {torch.bfloat16: 2, torch.float32: 4}
"""Rows of a product at least. A linear layer's row has the same bits for any number of rows from here on (measured with
torch 2.13 on CPU), so a row of a verify step equals the same row of a plain step."""


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [rows, n] with rows of zeros behind it, if it has fewer than its dtype's MIN_ROWS."""
    missing = MIN_ROWS[x.dtype] - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing > 0 else x
