"""Choosing and weighing experts, as reference and as kernel, against plain loops."""

import math
from collections.abc import Callable

import pytest
import torch

from tandem.kernels.route import Routing, route
from tandem.kernels.triton.route import fits, launch_route

Op = Callable[[torch.Tensor, torch.Tensor | None, int, Routing], tuple[torch.Tensor, torch.Tensor]]

QWEN = Routing(sigmoid=False, groups=1, kept_groups=1, normalise=True, scale=1.0)
RAW = Routing(sigmoid=False, groups=1, kept_groups=1, normalise=False, scale=1.0)
KIMI = Routing(sigmoid=True, groups=1, kept_groups=1, normalise=True, scale=2.827)
DEEPSEEK = Routing(sigmoid=True, groups=4, kept_groups=2, normalise=True, scale=2.5)


def _expected(logits: list[float], bias: list[float], count: int, routing: Routing) -> dict[int, float]:
    if routing.sigmoid:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        scores = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(logits) // routing.groups
    groups = [range(i, i + size) for i in range(0, len(logits), size)]
    groups.sort(key=lambda group: sum(sorted(choice[e] for e in group)[-2:]), reverse=True)
    allowed = [e for group in groups[: routing.kept_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: choice[e], reverse=True)[:count]
    total = sum(scores[e] for e in chosen) if routing.normalise else 1.0
    return {e: scores[e] / total * routing.scale for e in chosen}


@pytest.mark.parametrize("op", [route, launch_route], ids=["reference", "kernel"])
@pytest.mark.parametrize(
    ("routing", "count", "experts"), [(QWEN, 4, 16), (RAW, 2, 5), (KIMI, 8, 24), (DEEPSEEK, 3, 16)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_a_row_goes_to_its_best_experts(op: Op, routing: Routing, count: int, experts: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(6, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) / 4 if biased else torch.zeros(experts)
    weights, ids = op(logits, bias if biased else None, count, routing)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    for row in range(6):
        expected = _expected(logits[row].tolist(), bias.tolist(), count, routing)
        found = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_kernel_takes_groups_that_are_powers_of_two() -> None:
    assert fits(256, Routing(True, 8, 4, True, 2.5))
    assert fits(384, KIMI)
    assert not fits(160, Routing(True, 8, 3, True, 16.0))
