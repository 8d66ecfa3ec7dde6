"""Drafts as arrays: the probability of each node's path from the root, and how far that can be trusted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.draft_tree import Draft

MAX_DEPTH = 16
"""Deeper nodes are calibrated as these."""
_BINS = 4
"""Calibrated apart: path probabilities below 1/4, 1/2, 3/4 and 1."""
_DEPTH_CELLS = (MAX_DEPTH + 1) * _BINS
"""Cells of greedy drafts, or of sampled ones, which come behind them."""
_PRIOR = 4.0
"""Expected acceptances a ratio must rest on before it outweighs what it starts from."""
_FORGET = 0.998
"""Weight of what is known after one more draft: a memory of 500 drafts."""


@dataclass(frozen=True)
class Paths:
    """The nodes of some drafts; columns beyond a draft's end have probability 0 and depth 0."""

    probabilities: np.ndarray
    """[drafts, nodes] float: that the walk reaches the node, as the draft model has it."""
    cells: np.ndarray
    """[drafts, nodes] int: what is calibrated together: sampled or not, depth, and bin of the probability."""
    lengths: np.ndarray
    """[drafts] int."""
    sampled: np.ndarray
    """[drafts] bool: whether the sequence samples: likely tokens are accepted less often where tokens are drawn."""

    @classmethod
    def of(cls, drafts: Sequence[Draft], sampled: Sequence[bool]) -> "Paths":
        lengths = np.array([len(draft) for draft in drafts])
        shape = len(drafts), int(lengths.max(initial=0))
        sums, depths = np.full(shape, -np.inf), np.zeros(shape, dtype=int)
        for row, draft in enumerate(drafts):
            sums[row, : len(draft)] = draft.path_log_probs()
            depths[row, : len(draft)] = draft.depths
        probabilities = np.exp(np.minimum(0.0, sums))
        bins = np.minimum((probabilities * _BINS).astype(int), _BINS - 1)
        draws = np.array(sampled, dtype=bool)
        cells = np.minimum(depths, MAX_DEPTH) * _BINS + bins + draws[:, None] * _DEPTH_CELLS
        return cls(probabilities, cells, lengths, draws)

    @classmethod
    def joined(cls, parts: Sequence["Paths"]) -> "Paths":
        """One after another."""
        if len(parts) == 1:
            return parts[0]
        lengths = np.concatenate([part.lengths for part in parts])
        shape = len(lengths), int(lengths.max(initial=0))
        probabilities, cells = np.zeros(shape), np.zeros(shape, dtype=int)
        first = 0
        for part in parts:
            count, width = part.cells.shape
            probabilities[first : first + count, :width] = part.probabilities
            cells[first : first + count, :width] = part.cells
            first += count
        return cls(probabilities, cells, lengths, np.concatenate([part.sampled for part in parts]))

    def only(self, chosen: np.ndarray) -> "Paths":
        """Of some of the drafts; chosen: [drafts] bool."""
        if chosen.all():
            return self
        lengths = self.lengths[chosen]
        width = int(lengths.max(initial=0))
        return Paths(self.probabilities[chosen, :width], self.cells[chosen, :width], lengths, self.sampled[chosen])


def mass_by_depth(probabilities: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """[1 + MAX_DEPTH] sums of path probabilities of nodes, flat."""
    return np.bincount(cells % _DEPTH_CELLS // _BINS, probabilities, MAX_DEPTH + 1)


class Calibration:
    """How often nodes are accepted against how probable the draft model finds them, by depth and probability, for
    sequences that sample apart from greedy ones.

    A ratio per cell starts from its depth's, which starts from that of all nodes of its sort, which starts from that of
    both sorts, which starts from 1. Old drafts are forgotten.
    """

    def __init__(self) -> None:
        self._seen = np.zeros((2, 2, MAX_DEPTH + 1, _BINS))
        """[expected or accepted, sampled or not, depth, bin]"""
        self._ratios = np.ones(2 * _DEPTH_CELLS)

    def gains(self, probabilities: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Calibrated probability that each node is accepted: the tokens it is expected to add."""
        return np.minimum(1.0, probabilities * self._ratios[cells])

    def observe(
        self, probabilities: np.ndarray, cells: np.ndarray, accepted: np.ndarray, greedy: int, sampled: int
    ) -> None:
        """Verified nodes of so many greedy and sampled drafts, flat, and which were accepted (bool)."""
        seen = self._seen
        seen *= np.array([_FORGET**greedy, _FORGET**sampled])[:, None, None]
        for table, weights in zip(seen, (probabilities, accepted), strict=True):
            table += np.bincount(cells, weights, table.size).reshape(table.shape)
        by_depth = seen.sum(axis=3, keepdims=True)
        by_sort = by_depth.sum(axis=2, keepdims=True)
        ratios: np.ndarray | float = 1.0
        for thought, found in (by_sort.sum(axis=1, keepdims=True), by_sort, by_depth, seen):
            ratios = (found + _PRIOR * ratios) / (thought + _PRIOR)
        self._ratios = np.ravel(ratios)

    def deviation(self, greedy: bool, sampled: bool) -> float:
        """Relative standard deviation of what nodes of these sorts are expected to add: that of a count of the
        acceptances seen."""
        return 1 / math.sqrt(1 + float(self._seen[1, [greedy, sampled]].sum()))

    def per_depth(self) -> list[float]:
        """Accepted over expected at depth 1, 2, ... as far as nodes were verified."""
        expected, accepted = self._seen.sum(axis=(1, 3))
        return [float(a / e) for a, e in zip(accepted[1:], expected[1:], strict=True) if e > 0.01]


class DraftMemory:
    """The last drafts, as a sample of what the next ones will be worth.

    A draft that was asked for with fewer nodes than are of interest is extended by the mean ratio of successive gains
    that longer drafts had.
    """

    SIZE = 128

    def __init__(self, max_nodes: int):
        self._probabilities = np.zeros((self.SIZE, max_nodes))
        self._cells = np.zeros((self.SIZE, max_nodes), dtype=int)
        self._cut_at = np.full(self.SIZE, max_nodes)
        self._ratio = np.full(max_nodes, 0.8)
        """[nodes] probability of node i relative to node i - 1's."""
        self.count = 0

    def add(self, paths: Paths, asked: np.ndarray) -> None:
        """Drafts, and how many nodes each was asked for."""
        count, width = paths.probabilities.shape
        slots = (self.count + np.arange(count)) % self.SIZE
        self.count += count
        lengths = paths.lengths
        self._probabilities[slots] = 0.0
        self._probabilities[slots, :width] = paths.probabilities
        # Shorter than asked for: there is no more, however many are asked for.
        cut = (lengths >= asked) & (lengths > 0)
        self._cut_at[slots] = np.where(cut, lengths, self._probabilities.shape[1])
        last = paths.cells[np.arange(count), np.maximum(lengths, 1) - 1] if width else np.zeros(count, dtype=int)
        self._cells[slots] = last[:, None]
        self._cells[slots, :width] = np.where(np.arange(width) < lengths[:, None], paths.cells, last[:, None])
        widest = int(paths.lengths.max(initial=0))
        if widest > 1:
            total = paths.probabilities.sum(axis=0)
            known = self._ratio[1:widest]
            known += 0.05 * (np.minimum(1.0, total[1:] / np.maximum(total[:-1], 1e-9)) - known)

    def sample(self, groups: int, sequences: int, nodes: int, calibration: Calibration) -> np.ndarray:
        """[groups, sequences, nodes] calibrated gains of the latest drafts, repeated if there are too few."""
        held = min(self.count, self.SIZE)
        slots = (self.count - 1 - np.arange(groups * sequences) % held) % self.SIZE
        probabilities = self._probabilities[slots, :nodes]
        cut = self._cut_at[slots]
        if (cut < nodes).any():
            steps = np.where(np.arange(nodes) >= cut[:, None], self._ratio[:nodes], 1.0)
            last = probabilities[np.arange(len(slots)), np.minimum(cut, nodes) - 1]
            tail = last[:, None] * np.cumprod(steps, axis=1)
            probabilities = np.where(np.arange(nodes) >= cut[:, None], tail, probabilities)
        gains = calibration.gains(probabilities, self._cells[slots, :nodes])
        return gains.reshape(groups, sequences, nodes)
