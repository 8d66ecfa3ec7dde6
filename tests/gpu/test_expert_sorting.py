"""The compiled sorting of slots equals its reference."""

import pytest
import torch

from tandem.kernels.expert_sorting import sort_by_expert


@pytest.mark.parametrize(
    ("rows", "k", "experts", "block_rows"), [(1, 8, 48, 16), (64, 8, 384, 16), (1000, 8, 48, 64), (3, 1, 1, 16)]
)
@pytest.mark.parametrize("held", [True, False], ids=["some held", "none held"])
def test_slots_are_listed_by_expert(
    device: torch.device, rows: int, k: int, experts: int, block_rows: int, held: bool
) -> None:
    places = torch.randint(0 if held else experts, experts + 1, (rows, k))
    for found, expected in zip(
        sort_by_expert(places.to(device), experts, block_rows), sort_by_expert(places, experts, block_rows), strict=True
    ):
        assert torch.equal(found.cpu(), expected)
