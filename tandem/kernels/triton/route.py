"""One program per row, all of it in registers: in torch it is a dozen launches in every layer of every step."""

import torch
import triton
import triton.language as tl

from tandem.kernels.route import Routing


def fits(experts: int, routing: Routing) -> bool:
    """Whether the kernel takes it: groups must be powers of two in number and in size."""
    whole = triton.next_power_of_2(experts) == experts and triton.next_power_of_2(routing.groups) == routing.groups
    return routing.groups == 1 or (whole and routing.groups < experts)


def launch_route(
    logits: torch.Tensor, bias: torch.Tensor | None, count: int, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tandem.kernels.route."""
    rows, experts = logits.shape
    weights = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    _route[(rows,)](
        logits.contiguous(),
        logits if bias is None else bias,
        weights,
        ids,
        routing.scale,
        EXPERTS=experts,
        BLOCK=triton.next_power_of_2(experts),
        COUNT=count,
        SLOTS=triton.next_power_of_2(count),
        SIGMOID=routing.sigmoid,
        BIAS=bias is not None,
        GROUPS=routing.groups,
        KEPT=routing.kept_groups,
        NORMALISE=routing.normalise,
        num_warps=2,
    )
    return weights, ids


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=expert < EXPERTS, other=-float("inf"))
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    choice = scores
    if BIAS:
        choice += tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0)
    choice = tl.where(expert < EXPERTS, choice, -float("inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, BLOCK, GROUPS, KEPT)

    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    weights = tl.zeros((SLOTS,), tl.float32)
    for place in range(COUNT):
        best = tl.min(tl.where(choice == tl.max(choice, axis=0), expert, BLOCK), axis=0)
        ids = tl.where(slot == place, best, ids)
        weights = tl.where(slot == place, tl.sum(tl.where(expert == best, scores, 0.0), axis=0), weights)
        choice = tl.where(expert == best, -float("inf"), choice)
    if NORMALISE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    at = row * COUNT + slot
    tl.store(weights_ptr + at, weights * scale, mask=slot < COUNT)
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=slot < COUNT)


@triton.jit
def _in_best_groups(choice, BLOCK: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """-inf for experts outside the KEPT groups whose two best experts sum highest."""
    grouped = tl.reshape(choice, (GROUPS, BLOCK // GROUPS))
    member = tl.arange(0, BLOCK // GROUPS)[None, :]
    group = tl.arange(0, GROUPS)
    best = tl.max(grouped, axis=1)
    first = tl.min(tl.where(grouped == best[:, None], member, BLOCK), axis=1)
    sums = best + tl.max(tl.where(member == first[:, None], -float("inf"), grouped), axis=1)
    kept = group < 0
    for _ in range(KEPT):
        highest = tl.min(tl.where(sums == tl.max(sums, axis=0), group, GROUPS), axis=0)
        kept = kept | (group == highest)
        sums = tl.where(group == highest, -float("inf"), sums)
    return tl.reshape(tl.where(kept[:, None], grouped, -float("inf")), (BLOCK,))
