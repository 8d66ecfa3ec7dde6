"""SwiGLU: the dense MLP, an expert, or a rank's columns of either."""

import torch
import torch.nn.functional as F

from tandem.checkpoints.shard import WHOLE, Shard
from tandem.checkpoints.weights import AnyLinear, WeightReader
from verifier_service.models.min_rows import pad_rows
from verifier_service.models.reduction import added_to
from verifier_service.models.target_config import ExpertNames
from verifier_service.parallel.ranks import OneRank, Ranks


class Mlp:
    """down(silu(gate x) * up x)."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        hidden: int,
        inner: int,
        names: ExpertNames,
        shard: Shard = WHOLE,
        ranks: Ranks | None = None,
    ):
        """shard: the columns of the inner dimension held here, ranks: those that hold the others."""
        self._ranks = ranks or OneRank()
        gate_up = [(prefix + names.gate, inner), (prefix + names.up, inner)]
        self._gate_up = reader.linear(gate_up, hidden, shard, dim=0)
        self._down = reader.linear([(prefix + names.down, hidden)], inner, shard, dim=1)
        self.nbytes = self._gate_up.nbytes + self._down.nbytes
        """Memory the weights held here take."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, hidden]: this rank's part of the sum."""
        return self._down(self._inner(x))

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """The same for any number of rows: a row's bits do not depend on how many there are."""
        return self(pad_rows(x))[: len(x)]

    @property
    def linears(self) -> tuple[AnyLinear, AnyLinear]:
        """gate_up and down."""
        return self._gate_up, self._down

    def added_to(
        self, residual: torch.Tensor, x: torch.Tensor, real_rows: int, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """residual + the MLP of x, over all ranks. All rows are computed, real or not."""
        return added_to(residual, self._down, self._inner(x), self._ranks)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return F.silu(gate) * up
