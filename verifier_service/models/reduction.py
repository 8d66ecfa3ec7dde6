"""Where the ranks' parts of a layer come together."""

import torch

from tandem.checkpoints.weights import AnyLinear
from verifier_service.parallel.ranks import Ranks


def added_to(residual: torch.Tensor, linear: AnyLinear, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """residual + the sum over ranks of linear(x), where each rank holds columns of the weight and of x.

    The residual is added behind the sum, by every rank: they all hold it, and it stays out of what travels.
    """
    if ranks.size == 1:
        return linear.added_to(residual, x)
    return residual + ranks.all_reduce(linear(x))
