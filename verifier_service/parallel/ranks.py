"""What a model needs to know of the ranks it is split over."""

from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.checkpoints.shard import WHOLE, Shard


class Ranks(Protocol):
    """The processes that run one target together. Rank 0 serves and decides."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' x, added up in rank order, so that all get the same bits; x may be overwritten."""
        ...

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """On rank 0 all ranks' x [rows, n] side by side, [rows, size * n]; elsewhere x."""
        ...


class Group(Ranks, Protocol):
    """Ranks that are processes."""

    def abort(self, error: Exception) -> None:
        """A rank is gone, says another thread of rank 0: what waits for it, or will, raises this error."""
        ...


class OneRank:
    """No parallelism."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclass(frozen=True)
class Parallel:
    """How a target is split. All ranks see the same rows and the same routing."""

    ranks: Ranks
    attention: Shard = WHOLE
    """Heads of attention, columns of the dense MLP and rows of the head; WHOLE replicates them (tp 1)."""
    experts: Shard = WHOLE
    """Of a mixture of experts: whole experts, or, if cut, the same columns of every expert."""
    cut_experts: bool = False


ALONE = Parallel(OneRank())
