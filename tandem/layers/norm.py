"""Normalisation."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in fp32 inside, returned in x's dtype."""
    return F.rms_norm(x, weight.shape, weight, eps)
