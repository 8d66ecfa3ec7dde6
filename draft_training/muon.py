"""Muon: momentum whose directions all count the same, for the matrices of a network's layers.

Source: K. Jordan et al., Muon (2024); update size as in Moonlight (arXiv 2502.16982); polynomials of Polar Express
(arXiv 2505.16932). torch.optim.Muon multiplies in bfloat16: for the demo draft model's matrices a step takes 2.1 s of a
core without matrix units there, 1.3 s here.
"""

from collections.abc import Iterable
from typing import Any

import torch

_POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_MARGIN = 1.02
"""The polynomials hold for singular values below 1."""
_ADAMW_SIZE = 0.2
"""Root mean square of an AdamW update at learning rate 1, roughly."""


class Muon(torch.optim.Optimizer):
    """All parameters are matrices. Learning rate and weight decay count as AdamW's do."""

    def __init__(self, parameters: Iterable[Any], weight_decay: float, momentum: float = 0.95):
        """The learning rate is set per step, in param_groups."""
        super().__init__(parameters, {"lr": 0.0, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Every parameter that has a gradient."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - momentum)
                update = orthogonal(parameter.grad.lerp(state["momentum"], momentum))
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-rate * _ADAMW_SIZE * max(parameter.shape) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with all singular values brought near 1 (0.88 to 1.13; those below about 1/1000 of the largest stay
    smaller)."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() * _MARGIN + 1e-7)
    for a, b, c in _POLYNOMIALS:
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T
