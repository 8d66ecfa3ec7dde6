"""Moves of slots, the torch reference and the kernel in Triton's interpreter, against a loop over copies."""

import random

import pytest
import torch

from tandem.kernels.kv_compaction import kv_compaction
from tandem.kernels.triton.kv_compaction import launch_kv_compaction

Moves = list[tuple[int, int]]


def _check(pool: torch.Tensor, moves: Moves) -> None:
    expected = pool.clone()
    for source, target in moves:
        expected[:, target] = pool[:, source]
    for operation in (kv_compaction, launch_kv_compaction):
        moved = pool.clone()
        sources, targets = torch.tensor(moves, dtype=torch.int32).reshape(-1, 2).unbind(1)
        operation(moved, sources, targets)
        assert torch.equal(moved, expected)


def _pool(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    "moves",
    [
        [(9, 8)],
        [(9, 8), (11, 9), (14, 10)],
        [(8, 9), (9, 10), (10, 11)],
        [(5, 3), (3, 5)],
        [(9, 8), (0, 0), (0, 0), (30, 20), (12, 12)],
        [(0, 0)] * 5,
        [],
    ],
    ids=["one", "sources are later targets", "targets are later sources", "swap", "unused moves", "none used", "none"],
)
def test_all_slots_are_read_before_one_is_written(moves: Moves) -> None:
    _check(_pool(3, 32, 2, 1, 12), moves)


def test_features_and_wide_slots() -> None:
    """Slots wider than a program takes, of a width that is no power of two, with more moves than a block of keys."""
    slots = random.Random(1).sample(range(1, 256), 80)
    _check(_pool(1, 256, 520, dtype=torch.bfloat16), [*zip(slots[:40], slots[40:], strict=True), (0, 0)])
