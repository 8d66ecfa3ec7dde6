"""Ranks of a target as threads of one process: reductions over a barrier, summed in rank order."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tandem.checkpoints.shard import WHOLE, Shard
from verifier_service.parallel.ranks import Parallel

Result = TypeVar("Result")

_PATIENCE = 60.0


class ThreadRanks:
    """One thread's view of the group: a Ranks."""

    def __init__(self, rank: int, barrier: threading.Barrier, desk: list[torch.Tensor]):
        """desk: one place per rank, shared by all."""
        self.rank = rank
        self.size = len(desk)
        self._barrier = barrier
        self._desk = desk

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total, *others = self._everyones(x)
        total = total.clone()
        for other in others:
            total += other
        return total

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        all_columns = torch.cat(self._everyones(x), dim=-1)
        return all_columns if self.rank == 0 else x

    def _everyones(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._desk[self.rank] = x
        self._barrier.wait()
        found = list(self._desk)
        self._barrier.wait()
        return found


def run_ranks(size: int, split_attention: bool, cut_experts: bool, work: Callable[[Parallel], Result]) -> list[Result]:
    """What `work` returned on each rank. If one fails the others do not wait for it; its exception is raised.

    Each rank computes in one thread, so that none leaves a pool of OpenMP threads behind.
    """
    threads_before = torch.get_num_threads()
    barrier = threading.Barrier(size, timeout=_PATIENCE)
    desk = [torch.empty(0)] * size

    def one(rank: int) -> Result:
        torch.set_num_threads(1)
        shard = Shard(rank, size)
        parallel = Parallel(ThreadRanks(rank, barrier, desk), shard if split_attention else WHOLE, shard, cut_experts)
        try:
            with torch.inference_mode():
                return work(parallel)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, rank) for rank in range(size)]
    torch.set_num_threads(threads_before)
    errors = [e for f in futures if (e := f.exception())]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [f.result() for f in futures]
