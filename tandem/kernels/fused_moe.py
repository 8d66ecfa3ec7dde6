"""A mixture of experts over rows that each go to some of them, in one call of fixed shape."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tandem.kernels.expert_stack import ExpertStack


def fused_moe(x: torch.Tensor, experts: ExpertStack, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x [rows, hidden], weights [rows, k] fp32, places [rows, k] int64: the index of each choice's expert in the stack,
    the stack's size where it is not held here -> [rows, hidden] fp32: the weighted sum of what the held ones say.

    A row's experts speak in x's dtype and are added in fp32 in an order that is the row's own: in order of its choices
    on a GPU, of the experts in the reference. No atomic adds, so its bits depend on nothing that shares the step.
    Nothing waits for the device.
    """
    if x.is_cuda:
        from tandem.kernels.triton.fused_moe import launch_fused_moe

        return launch_fused_moe(x, experts, weights, places)
    said = [_expert(experts, i) for i in range(experts.count)]
    return every_expert(x, said, weights, places)


def every_expert(
    x: torch.Tensor,
    experts: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    weights: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """As fused_moe, for experts that are functions of [rows, hidden]: each computes every row, whoever asked for it, so
    that shapes do not depend on the routing."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for i, expert in enumerate(experts):
        total += expert(x) * torch.where(places == i, weights, 0.0).sum(dim=-1, keepdim=True)
    return total


def _expert(experts: ExpertStack, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    gate_up, down = experts.gate_up.one(index), experts.down.one(index)

    def said(x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(F.silu(gate) * up)

    return said
