"""The largest logits of each row and what all of them come to, in one pass over the vocabulary."""

from typing import NamedTuple

import torch

from tandem.layers.argmax import argmax_rows
from tandem.layers.top_k import top_k_rows


class TopK(NamedTuple):
    """Of each row. Log-probabilities are values - log_sums[:, None]."""

    values: torch.Tensor
    """[rows, k] fp32, largest first."""
    ids: torch.Tensor
    """[rows, k] int64. On a GPU the lowest id comes first among equals."""
    log_sums: torch.Tensor
    """[rows] fp32: logsumexp of the whole row."""


def top_k(logits: torch.Tensor, k: int) -> TopK:
    """logits [rows, vocab], any float dtype; k: at most vocab. Nothing waits for the device."""
    if logits.is_cuda:
        from tandem.kernels.triton.top_k import launch_top_k

        return TopK(*launch_top_k(logits, k))
    logits = logits.float()
    if k == 1:
        ids = argmax_rows(logits)[:, None]
        values = logits.gather(-1, ids)
    else:
        values, ids = top_k_rows(logits, k)
    return TopK(values, ids, logits.logsumexp(dim=-1))
