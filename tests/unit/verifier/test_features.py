"""Features of a slot are those of the taps written to it last, however many wait and whenever they are read."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from verifier_service.features import FeaturePool

SLOTS, HIDDEN = 700, 8


@dataclass
class _Config:
    hidden_size: int = HIDDEN


class _Halves:
    """A projection that adds the second half of the taps to the first, and counts its calls."""

    config = _Config()
    inputs = 2 * HIDDEN

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, taps: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(taps))
        return taps[:, :HIDDEN] + taps[:, HIDDEN:]


@pytest.fixture
def projection() -> _Halves:
    return _Halves()


@pytest.fixture
def pool(projection: _Halves) -> FeaturePool:
    return FeaturePool(SLOTS, projection, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]


def read(pool: FeaturePool, slots: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(pool.read(slots), np.float32).copy()).view(len(slots), HIDDEN)


@pytest.mark.parametrize("rows", [1, 7, 300, 600])
def test_what_is_read_was_written_last(pool: FeaturePool, rows: int) -> None:
    """Slots are written many times between reads, in steps of any size; taps may be written over once they are handed
    over."""
    random = torch.Generator().manual_seed(rows)
    expected = torch.zeros(SLOTS, HIDDEN)
    for step in range(40):
        slots = torch.randperm(SLOTS, generator=random)[:rows]
        taps = torch.randn(rows, 2 * HIDDEN, generator=random)
        pool.write(slots, taps)
        expected[slots] = taps[:, :HIDDEN] + taps[:, HIDDEN:]
        taps.zero_()
        if step % 9 == 8:
            some = torch.randperm(SLOTS, generator=random)[:50]
            assert torch.equal(read(pool, some), expected[some])
    assert torch.equal(read(pool, torch.arange(SLOTS)), expected)


def test_steps_share_a_product_while_nobody_reads(pool: FeaturePool, projection: _Halves) -> None:
    for step in range(64):
        pool.write(torch.arange(8) + 8 * step, torch.randn(8, 2 * HIDDEN))
    assert projection.rows == []
    pool.write(torch.arange(8) + 8 * 64, torch.randn(8, 2 * HIDDEN))
    assert projection.rows == [FeaturePool.MAX_WAITING]
