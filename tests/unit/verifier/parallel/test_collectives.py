"""Collectives over real processes: the sum in rank order, in fp32, rounded once, with the same bits on every rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fakes.ports import free_port
from tests.fakes.rank_world import CASES, MANY, part


def in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(parts[0].shape)
    for p in parts:
        total = total + p.float()
    return total.to(parts[0].dtype)


def check(folder: Path, size: int) -> None:
    everyone = range(size)
    sums = [in_rank_order([part(i, r) for r in everyone]) for i in range(len(CASES))]
    many = [in_rank_order([part(2, r, step) for r in everyone]) for step in range(MANY)]
    expected = [*sums, sums[2].t(), *many]
    for rank in everyone:
        got = torch.load(folder / f"{rank}.pt")
        reduced, columns = got[: len(expected)], got[len(expected) :]
        assert all(map(torch.equal, reduced, expected)), f"rank {rank}"
        for i, of_case in enumerate(columns):
            whole = torch.cat([part(i, r) for r in everyone], dim=1) if rank == 0 else part(i, rank)
            assert torch.equal(of_case, whole)
    backwards = in_rank_order([part(1, r) for r in reversed(everyone)])
    assert size == 2 or not torch.equal(backwards, sums[1]), "the order does not show"


def start(kind: str, size: int, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.fakes.rank_world", kind, str(size), str(folder)]
    return subprocess.Popen(command, env={**os.environ, **environment})


@pytest.mark.parametrize(("kind", "size"), [("shared", 2), ("shared", 8), ("gloo", 3)])
def test_forked_ranks_get_the_sum_in_rank_order(tmp_path: Path, kind: str, size: int) -> None:
    assert start(kind, size, tmp_path).wait(60) == 0
    check(tmp_path, size)


def test_ranks_that_were_started_apart_meet_and_share_memory(tmp_path: Path) -> None:
    """By RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone; they leave no file behind."""
    files = set(Path("/dev/shm").iterdir())
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start("meet", 2, tmp_path, RANK=str(rank), **where) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    check(tmp_path, 2)
    assert not [f for f in set(Path("/dev/shm").iterdir()) - files if f.name.startswith("tandem-")]
