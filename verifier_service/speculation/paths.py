"""Drafts as arrays: the probability of each node's path from the root, and how far that can be trusted."""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

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
_OWN_DRAFTS = 24
"""Remembered of a sequence at most, so that one long text does not push out what is known of others."""
_FOREIGN_DRAFTS = 8
"""Own drafts of a sequence that count as much as all others' together."""
_USUAL = 4.0
"""Expected acceptances of a sequence that count as much as what is usual."""
_FORGET_OWN = 0.98
"""Weight of what a sequence accepted after one more draft of it."""
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
    sequences: np.ndarray
    """[drafts] int: whose they are."""

    @classmethod
    def of(cls, drafts: Sequence[Draft], sampled: Sequence[bool], sequences: Sequence[int]) -> "Paths":
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
        return cls(probabilities, cells, lengths, draws, np.array(sequences, dtype=int))

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
        sampled, sequences = (np.concatenate([getattr(p, name) for p in parts]) for name in ("sampled", "sequences"))
        return cls(probabilities, cells, lengths, sampled, sequences)

    def only(self, chosen: np.ndarray) -> "Paths":
        """Of some of the drafts; chosen: [drafts] bool."""
        if chosen.all():
            return self
        lengths = self.lengths[chosen]
        width = int(lengths.max(initial=0))
        nodes = self.probabilities[chosen, :width], self.cells[chosen, :width]
        return Paths(*nodes, lengths, self.sampled[chosen], self.sequences[chosen])


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

    def gains(self, probabilities: np.ndarray, cells: np.ndarray, trust: np.ndarray | None = None) -> np.ndarray:
        """Calibrated probability that each node is accepted: the tokens it is expected to add. trust: [drafts], what
        their sequences accept against what is usual."""
        usual = np.minimum(1.0, probabilities * self._ratios[cells])
        return usual if trust is None else np.minimum(1.0, usual * trust[:, None])

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


@dataclass
class _Text:
    """What is known of a sequence's drafts."""

    slots: deque[int] = field(default_factory=deque)
    """The latest last."""
    expected: float = 0.0
    """Tokens that verified nodes were to add; less of older drafts."""
    accepted: float = 0.0
    """What they did add."""


class DraftMemory:
    """The last drafts, as a sample of what the next ones will be worth: a sequence's own if it has some, since texts
    differ, for others one of every sequence in turn. And how much of what its drafts promise a sequence accepts,
    against what is usual.

    A draft that was asked for with fewer nodes than are of interest is extended by the mean ratio of successive gains
    that longer drafts had.
    """

    SIZE = 256

    def __init__(self, max_nodes: int):
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        """By sequence; the one that drafted last comes last."""
        self._sequences = np.zeros(self.SIZE, dtype=int)
        """[slots]: whose the draft is."""
        self._probabilities = np.zeros((self.SIZE, max_nodes))
        self._cells = np.zeros((self.SIZE, max_nodes), dtype=int)
        self._cut_at = np.full(self.SIZE, max_nodes)
        self._ratio = np.full(max_nodes, 0.8)
        """[nodes] probability of node i relative to node i - 1's."""
        self.count = 0
        """Drafts so far."""
        self._used = 0

    def add(self, paths: Paths, asked: np.ndarray) -> None:
        """Drafts, and how many nodes each was asked for."""
        count, width = paths.probabilities.shape
        slots = np.array([self._slot_for(sequence) for sequence in paths.sequences.tolist()])
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

    def _slot_for(self, sequence: int) -> int:
        """Where this sequence's next draft goes: a free slot, or its own oldest draft's if it has enough, or that of
        whoever has not drafted for longest."""
        self.count += 1
        text = self._texts.setdefault(sequence, _Text())
        self._texts.move_to_end(sequence)
        if len(text.slots) == _OWN_DRAFTS:
            slot = text.slots.popleft()
        elif self._used < self.SIZE:
            slot, self._used = self._used, self._used + 1
        else:
            longest_ago, other = next(iter(self._texts.items()))
            slot = other.slots.popleft()
            if not other.slots:
                del self._texts[longest_ago]
        text.slots.append(slot)
        self._sequences[slot] = sequence
        return slot

    def settle(self, sequence: int, expected: float, accepted: int) -> None:
        """Of a draft of this sequence nodes were verified that were expected to add so many tokens, and added these."""
        if text := self._texts.get(sequence):
            text.expected = _FORGET_OWN * text.expected + expected
            text.accepted = _FORGET_OWN * text.accepted + accepted

    def trust(self, sequence: int) -> float:
        """Of what its drafts promise, what it accepts, against what is usual."""
        text = self._texts.get(sequence)
        return (text.accepted + _USUAL) / (text.expected + _USUAL) if text else 1.0

    def stand_ins(self, groups: int, count: int, sequences: Sequence[int]) -> np.ndarray:
        """[groups, count] drafts that stand for the next ones of so many sequences, `sequences` among them."""
        texts = [text.slots for text in reversed(self._texts.values())]
        slots = np.resize(
            [own[-1 - age] for age in range(_OWN_DRAFTS) for own in texts if len(own) > age], (groups, count)
        )
        for column, sequence in enumerate(sequences[:count]):
            own = self._texts[sequence].slots if sequence in self._texts else ()
            known = round(groups * len(own) / (len(own) + _FOREIGN_DRAFTS))
            if known:
                slots[:known, column] = np.resize(tuple(reversed(own)), known)
        return slots

    def gains(self, stand_ins: np.ndarray, calibration: Calibration) -> np.ndarray:
        """[groups, sequences, nodes]: calibrated, of the nodes of these drafts."""
        slots = stand_ins.ravel()
        probabilities, cut = self._probabilities[slots], self._cut_at[slots]
        nodes = np.arange(probabilities.shape[1])
        if (cut < len(nodes)).any():
            beyond = nodes >= cut[:, None]
            last = probabilities[np.arange(len(slots)), cut - 1]
            tail = last[:, None] * np.cumprod(np.where(beyond, self._ratio, 1.0), axis=1)
            probabilities = np.where(beyond, tail, probabilities)
        trust = {sequence: self.trust(sequence) for sequence in set(self._sequences[slots].tolist())}
        trusts = np.array([trust[sequence] for sequence in self._sequences[slots].tolist()])
        return calibration.gains(probabilities, self._cells[slots], trusts).reshape(*stand_ins.shape, -1)
