"""The compiled router against its reference, for the routers of real targets."""

import pytest
import torch

from tandem.kernels.route import Routing, route


@pytest.mark.parametrize(
    ("experts", "count", "routing"),
    [
        (384, 8, Routing(sigmoid=True, groups=1, kept_groups=1, normalise=True, scale=2.827)),
        (256, 8, Routing(sigmoid=True, groups=8, kept_groups=4, normalise=True, scale=2.5)),
        (128, 8, Routing(sigmoid=False, groups=1, kept_groups=1, normalise=True, scale=1.0)),
        (160, 6, Routing(sigmoid=True, groups=8, kept_groups=3, normalise=False, scale=16.0)),
    ],
    ids=["kimi-k2", "deepseek-v3", "qwen3-moe", "groups the kernel does not take"],
)
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_rows_go_to_the_same_experts(
    device: torch.device, experts: int, count: int, routing: Routing, rows: int
) -> None:
    """Scores that are nearly equal may be chosen the other way round: 1 row in 500 may differ."""
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(rows, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) / 8 if routing.sigmoid else None
    weights, ids = route(logits.to(device), None if bias is None else bias.to(device), count, routing)
    expected_weights, expected_ids = route(logits, bias, count, routing)
    ids, order = ids.cpu().sort(dim=-1)
    expected_ids, expected_order = expected_ids.sort(dim=-1)
    same = (ids == expected_ids).all(dim=-1)
    assert (~same).sum() <= rows // 500
    found, expected = weights.cpu().gather(1, order), expected_weights.gather(1, expected_order)
    torch.testing.assert_close(found[same], expected[same], rtol=1e-5, atol=1e-6)
