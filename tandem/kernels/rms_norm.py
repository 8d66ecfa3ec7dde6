"""RMSNorm, alone or with the sum before it."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in fp32 inside, returned in x's dtype. x [..., dim], weight [dim]."""
    if x.is_cuda:
        from tandem.kernels.triton.rms_norm import launch_rms_norm

        return launch_rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + x, rounded to their dtype, and its RMSNorm. residual, x [rows, dim], weight [dim]."""
    if x.is_cuda:
        from tandem.kernels.triton.rms_norm import launch_add_rms_norm

        return launch_add_rms_norm(residual, x, weight, eps)
    total = residual + x
    return total, F.rms_norm(total, weight.shape, weight, eps)
