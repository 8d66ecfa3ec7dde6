"""Ranks as real processes that do the same collectives and save what they got.

    python -m tests.fakes.rank_world {shared,gloo} SIZE FOLDER     forks SIZE ranks
    python -m tests.fakes.rank_world meet SIZE FOLDER              is one of SIZE ranks, as the environment says

Each rank saves results() of its collectives in FOLDER/RANK.pt.
"""

import os
import sys
from pathlib import Path

import torch

from verifier_service.parallel.launch import fork_ranks, launch
from verifier_service.parallel.ranks import Group
from verifier_service.parallel.shared_memory import SharedMemoryRanks

CASES = [
    ((1, 1), torch.float32),
    ((8, 576), torch.float32),
    ((7, 13), torch.bfloat16),
    ((64, 576), torch.bfloat16),
    ((1100, 1024), torch.float32),
]
"""The last is larger than a slot of the shared memory."""

MANY = 100
"""Small reductions one after another, so that one rank's next meets another's last."""


def part(case: int, rank: int, step: int = 0) -> torch.Tensor:
    """What a rank brings to a case. Sums of such numbers depend on their order."""
    shape, dtype = CASES[case]
    generator = torch.Generator().manual_seed(1000 * step + 10 * case + rank)
    return (torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)).to(dtype)


def results(ranks: Group) -> list[torch.Tensor]:
    """Sums of all cases, of a transposed one, of many; columns side by side of all cases."""
    sums = [ranks.all_reduce(part(i, ranks.rank)) for i in range(len(CASES))]
    transposed = ranks.all_reduce(part(2, ranks.rank).t())
    many = [ranks.all_reduce(part(2, ranks.rank, step)) for step in range(MANY)]
    columns = [ranks.gather_columns(part(i, ranks.rank)) for i in range(len(CASES))]
    return [*sums, transposed, *many, *columns]


def main(kind: str, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    member = launch(size) if kind == "meet" else fork_ranks(size)
    ranks: Group
    if kind == "gloo":
        from verifier_service.parallel.distributed import DistributedRanks

        ranks = DistributedRanks(member, torch.device("cpu"))
    else:
        assert member.memory, "ranks of one host share memory"
        ranks = SharedMemoryRanks(member.memory, member.rank, member.size)
    torch.save(results(ranks), folder / f"{member.rank}.pt")
    for pid in member.pids.values():
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
