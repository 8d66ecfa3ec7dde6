"""A mixture of experts, of which a rank holds some whole experts or some columns of every one.

Every rank sees all rows and routes them alike; it adds up what its experts say and one reduction combines the ranks.
A row's sum runs over its experts in one order in fp32, rank by rank, so that its bits do not depend on what shares the
step: on a CPU in ascending order, on a GPU in the order of its choices. fp32 goes through the reduction as well, so
that a split adds no rounding.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tandem.checkpoints.shard import WHOLE
from tandem.checkpoints.weights import WeightReader
from tandem.kernels.expert_stack import ExpertStack
from tandem.kernels.fused_moe import every_expert, fused_moe
from verifier_service.models.mlp import Mlp
from verifier_service.models.router import Router
from verifier_service.models.target_config import Mixture
from verifier_service.parallel.ranks import Parallel


class MixtureOfExperts:
    """One layer's router, the experts held here and this rank's columns of the shared ones."""

    routed: torch.Tensor
    """[rows, experts per token] int64: the experts the last forward's real rows went to, on any rank. After a step of
    fixed shape those of all rows, in memory that such steps share."""

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
        experts = (Mlp(reader, f"{prefix}experts.{e}.", hidden, mixture.expert_size, names, columns) for e in held)
        self._experts: list[Mlp] = []
        self._stack: ExpertStack | None = None
        """On a GPU in place of _experts."""
        if self._router.device.type == "cuda":
            self._stack = ExpertStack.of((expert.linears for expert in experts), len(held))
        else:
            self._experts = list(experts)
        self.expert_bytes = self._stack.nbytes // len(held) if self._stack else self._experts[0].nbytes
        """Of one expert's weights, or of this rank's part of them."""
        # Cut over the ranks even where attention is not: the experts' reduction combines it, and no rank does it twice.
        self._shared = (
            Mlp(reader, f"{prefix}shared_experts.", hidden, mixture.shared_size, names, shard)
            if mixture.shared_size
            else None
        )
        self.nbytes = self._router.nbytes + (self._shared.nbytes if self._shared else 0)
        """Memory that the router and the shared experts take: what every row reads."""
        place = torch.full((mixture.experts,), len(held))
        place[torch.tensor(held, dtype=torch.int64)] = torch.arange(len(held))
        self._place = place.to(self._router.device)
        """Of every expert its index among those held here, or their number."""
        self._held = len(held)
        self._routed = place.new_empty((0, mixture.experts_per_token)).to(self._router.device)
        self._outgrown: list[torch.Tensor] = []
        """Where captured steps go on writing to."""

    def added_to(
        self, residual: torch.Tensor, x: torch.Tensor, real_rows: int, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """residual + the mixture of x [rows, hidden], over all ranks. Rows behind the real ones wake no expert.

        padding: [rows, 1] bool in steps of fixed shape, where only the device knows which rows stand for nothing.
        """
        total = self._static(x, padding) if padding is not None else self._dynamic(x, real_rows)
        if self._shared:
            total += self._shared(x)
        return (residual + self._ranks.all_reduce(total)).to(residual.dtype)

    def _static(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        weights, ids = self._router(x)
        if len(self._routed) < len(ids):
            self._outgrown.append(self._routed)
            self._routed = torch.empty_like(ids)
        self.routed = self._routed[: len(ids)].copy_(ids)
        places = self._places_of(ids).masked_fill(padding, self._held)
        if self._stack:
            return fused_moe(x, self._stack, weights, places)
        return every_expert(x, [expert.alone for expert in self._experts], weights, places)

    def _dynamic(self, x: torch.Tensor, real_rows: int) -> torch.Tensor:
        weights, self.routed = self._router(x[:real_rows])
        if self._stack:
            total = fused_moe(x[:real_rows], self._stack, weights, self._places_of(self.routed))
            return F.pad(total, (0, 0, 0, len(x) - real_rows))
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        self._add_experts(total, x, weights)
        return total

    def _places_of(self, ids: torch.Tensor) -> torch.Tensor:
        return self._place.index_select(0, ids.flatten()).view_as(ids)

    def _add_experts(self, total: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
        places = self._places_of(self.routed).flatten()
        order = places.argsort(stable=True)
        rows, weight = order // weights.shape[1], weights.flatten()[order, None]
        counts = places.bincount(minlength=self._held + 1).tolist()
        start = 0
        for expert, count in zip(self._experts, counts, strict=False):
            if count:
                mine = rows[start : start + count]
                said = expert.alone(x.index_select(0, mine))
                total.index_add_(0, mine, said * weight[start : start + count])
                start += count
