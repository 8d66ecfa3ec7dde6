"""Where the ranks' parts of a layer come together."""

import torch

from tandem.checkpoints.weights import AnyLinear
from tandem.kernels.rms_norm import add_rms_norm, rms_norm
from verifier_service.parallel.ranks import Ranks


def added_to(residual: torch.Tensor, linear: AnyLinear, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """residual + the sum over ranks of linear(x), where each rank holds columns of the weight and of x.

    The residual is added behind the sum, by every rank: they all hold it, and it stays out of what travels.
    """
    if ranks.size == 1:
        return linear.added_to(residual, x)
    return residual + ranks.all_reduce(linear(x))


def added_and_normed(
    residual: torch.Tensor, linear: AnyLinear, x: torch.Tensor, ranks: Ranks, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """added_to, and the RMSNorm of the sum. A GPU adds while it norms, a CPU while it multiplies."""
    if residual.is_cuda:
        return add_rms_norm(residual, ranks.all_reduce(linear(x)), norm, eps)
    total = added_to(residual, linear, x, ranks)
    return total, rms_norm(total, norm, eps)
