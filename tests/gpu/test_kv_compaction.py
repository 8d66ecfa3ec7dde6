"""The compiled moves of slots."""

import itertools
import random

import torch

from tandem.kernels.kv_compaction import kv_compaction


def test_moves_that_overlap_read_all_slots_before_one_is_written() -> None:
    """Many programs, many moves, every target a source too: shifted by one, and unused ones among them."""
    pool = torch.randn(36, 2048, 2, 8, 128, device="cuda").bfloat16()
    slots = random.Random(0).sample(range(1, 2048), 257)
    moves = [*itertools.pairwise(slots), (0, 0), (0, 0)]
    sources, targets = torch.tensor(moves, dtype=torch.int32, device="cuda").unbind(1)
    expected = pool.clone()
    expected[:, targets.long()] = pool[:, sources.long()]
    kv_compaction(pool, sources, targets)
    assert torch.equal(pool, expected)


def test_features() -> None:
    pool = torch.randn(1, 512, 4096, device="cuda").bfloat16()
    sources = torch.tensor([9, 12, 0], device="cuda")
    targets = torch.tensor([8, 9, 0], device="cuda")
    expected = pool.clone()
    expected[:, targets] = pool[:, sources]
    kv_compaction(pool, sources, targets)
    assert torch.equal(pool, expected)
