"""A router's logits to experts and their weights: softmax (Qwen3-MoE, Mixtral) or sigmoid with a bias and groups
(DeepSeek-V3, arXiv 2412.19437)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """How a row chooses its experts."""

    sigmoid: bool
    """Scores are sigmoids, each expert has a bias that counts for the choice only; otherwise scores are a softmax."""
    groups: int
    kept_groups: int
    """Groups are equal runs of experts; only experts of the kept_groups whose two best sum highest may be chosen."""
    normalise: bool
    """Weights of the chosen are made to sum to 1."""
    scale: float
    """Factor of the weights."""


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, count: int, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, experts] fp32, bias [experts] fp32 -> weights fp32 and expert ids int64, both [rows, count], in no
    order. On a GPU the best first, of equals the lowest id. Nothing waits for the device."""
    if logits.is_cuda:
        from tandem.kernels.triton.route import fits, launch_route

        if fits(logits.shape[1], routing):
            return launch_route(logits, bias, count, routing)
    return _reference(logits, bias, count, routing)


def _reference(
    logits: torch.Tensor, bias: torch.Tensor | None, count: int, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    # The vector unit's sigmoid differs from the one that does what is left over: in fp64 it cannot be seen.
    scores = logits.double().sigmoid().float() if routing.sigmoid else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        choice = _in_best_groups(choice, routing)
    ids = choice.topk(count, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * routing.scale, ids


def _in_best_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """-inf for experts outside the best groups."""
    grouped = choice.view(choice.shape[0], routing.groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(routing.kept_groups, dim=-1).indices
    dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, False)
    return grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
