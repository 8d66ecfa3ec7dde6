"""What steps ask of the routed experts: which are read, by which rank, how many tokens each gets. Knows no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.expert_placement import in_order


@dataclass(frozen=True)
class StepExperts:
    """What one step asked, over all layers with a mixture and all ranks."""

    rank_tokens: np.ndarray
    """[ranks]: tokens sent to each rank's experts; a token counts once per layer and chosen expert."""
    touched: float
    """Distinct experts that a layer reads, mean over layers."""
    imbalance: float
    """Tokens of each layer's busiest rank over the ranks' mean: what the layers wait for over what they could."""
    read_bytes: int
    """Weights of the touched experts, on all ranks."""
    busiest_bytes: int
    """The same on the rank that reads most of each layer."""


class ExpertLoad:
    """Counts for one target on its ranks. Written by the engine; totals may be read from any thread."""

    def __init__(
        self,
        layers: Sequence[int],
        experts: int,
        expert_bytes: Sequence[int],
        ranks: int,
        cut: bool = False,
        placement: Mapping[int, Sequence[Sequence[int]]] | None = None,
    ):
        """layers: those with a mixture. expert_bytes: of each layer, one expert's weights on one rank. cut: every rank
        has a part of every expert. placement: of each layer and rank the ids held there; None is in order of ids."""
        self._layers = layers
        self._expert_bytes = np.asarray(expert_bytes, np.int64)[:, None]
        self._parts = ranks if cut else 1
        """Ranks that share every expert; they do the same, so one of them is counted."""
        self._owners = owners = 1 if cut else ranks
        self._first = np.arange(len(layers))[:, None] * experts
        held = [placement[layer] if placement else in_order(experts, owners) for layer in layers]
        owner = np.empty((len(layers), experts), np.int64)
        for row, of_ranks in enumerate(held):
            for rank, ids in enumerate(of_ranks):
                owner[row, list(ids)] = row * owners + rank
        self._owner = owner.ravel()
        """Of each layer's each expert: layer * owners + rank."""
        self._totals = np.zeros(len(layers) * experts, np.int64)

    def count(self, routing: np.ndarray) -> StepExperts:
        """routing: [layers, rows, experts per token], the experts a step's rows went to."""
        layers = len(routing)
        ids = routing.reshape(layers, -1) + self._first
        counts = np.bincount(ids.ravel(), minlength=len(self._totals))
        self._totals += counts
        touched = np.flatnonzero(counts > 0)
        owner = self._owner[touched]
        places = layers * self._owners
        tokens = np.bincount(owner, counts[touched], places).reshape(layers, -1)
        read = np.bincount(owner, minlength=places).reshape(layers, -1) * self._expert_bytes
        return StepExperts(
            rank_tokens=np.repeat(tokens.sum(0), self._parts),
            touched=len(touched) / layers,
            imbalance=float(tokens.max(1).sum()) * self._owners / ids.size,
            read_bytes=int(read.sum()) * self._parts,
            busiest_bytes=int(read.max(1).sum()),
        )

    def totals(self) -> dict[int, list[int]]:
        """Of each layer the tokens each expert got since start, in order of ids."""
        by_layer = self._totals.reshape(len(self._layers), -1).tolist()
        return dict(zip(self._layers, by_layer, strict=True))
