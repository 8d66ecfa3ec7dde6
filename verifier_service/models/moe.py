"""A mixture of experts, of which a rank holds some whole experts or some columns of every one.

Every rank sees all rows and routes them alike; it adds up what its experts say and one reduction combines the ranks.
A row's sum runs over the experts in ascending order in fp32, rank by rank, so that its bits do not depend on what
shares the step; fp32 goes through the reduction as well, so that a split adds no rounding.
"""

from collections.abc import Sequence

import torch

from tandem.checkpoints.shard import WHOLE
from tandem.checkpoints.weights import WeightReader
from verifier_service.models.min_rows import pad_rows
from verifier_service.models.mlp import Mlp
from verifier_service.models.router import Router
from verifier_service.models.target_config import Mixture
from verifier_service.parallel.ranks import Parallel


class MixtureOfExperts:
    """One layer's router, the experts held here and this rank's columns of the shared ones."""

    routed: torch.Tensor
    """[rows, experts per token] int64: the experts the last forward's real rows went to, on any rank."""

    def __init__(
        self,
        mixture: Mixture,
        hidden: int,
        reader: WeightReader,
        prefix: str,
        held: Sequence[int],
        parallel: Parallel,
    ):
        """held: ids of the experts held here, ascending."""
        names, shard = mixture.names, parallel.experts
        self._ranks = parallel.ranks
        self._router = Router(mixture, hidden, reader, prefix + "gate.")
        columns = shard if parallel.cut_experts else WHOLE
        self._experts = [
            Mlp(reader, f"{prefix}experts.{e}.", hidden, mixture.expert_size, names, columns) for e in held
        ]
        self.expert_bytes = self._experts[0].nbytes
        """Of one expert's weights, or of this rank's part of them."""
        # Cut over the ranks even where attention is not: the experts' reduction combines it, and no rank does it twice.
        self._shared = (
            Mlp(reader, f"{prefix}shared_experts.", hidden, mixture.shared_size, names, shard)
            if mixture.shared_size
            else None
        )
        place = torch.full((mixture.experts,), len(held))
        place[torch.tensor(held, dtype=torch.int64)] = torch.arange(len(held))
        self._place = place.to(self._router.device)
        """Of every expert its index in _experts, or one beyond the last."""

    def added_to(self, residual: torch.Tensor, x: torch.Tensor, real_rows: int) -> torch.Tensor:
        """residual + the mixture of x [rows, hidden], over all ranks. Rows behind the real ones wake no expert."""
        weights, self.routed = self._router(x[:real_rows])
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        self._add_experts(total, x, weights)
        if self._shared:
            total += self._shared(x)
        return (residual + self._ranks.all_reduce(total)).to(residual.dtype)

    def _add_experts(self, total: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
        places = self._place.index_select(0, self.routed.flatten())
        order = places.argsort(stable=True)
        rows, weight = order // weights.shape[1], weights.flatten()[order, None]
        counts = places.bincount(minlength=len(self._experts) + 1).tolist()
        start = 0
        for expert, count in zip(self._experts, counts, strict=False):
            if count:
                mine = rows[start : start + count]
                said = expert(pad_rows(x.index_select(0, mine)))[:count]
                total.index_add_(0, mine, said * weight[start : start + count])
                start += count
