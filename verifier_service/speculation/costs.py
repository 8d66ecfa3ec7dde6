"""What a step of the target and a round of drafts cost, in seconds: a curve from start-up, corrected online."""

import math
from dataclasses import dataclass

import numpy as np

from verifier_service.speculation.estimates import DriftingRatio, Place

_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows at which steps that are not captured are corrected."""
_DRAFT_KNOTS = (2, 32)
"""Nodes at which drafts are corrected: few, since what is not asked for keeps a correction that nothing checks."""
_LEVEL_SPREAD = 0.3
"""How far all steps may be off it together, the handling of tokens included, which is not measured at start."""
_STEP_SPREAD = 0.15
"""How far a bucket may be off the curve measured at start, before anything is measured in it (log)."""
_DRAFT_LEVEL_SPREAD, _DRAFT_SPREAD = 2.0, 0.3
"""The same two for drafts, whose curve is a guess."""
_STEP_NOISE, _DRAFT_NOISE = 0.12, 0.2
"""Of one measurement, relative. Drafts go to another process and back, which other work may hold up."""
_SMALLEST_WAIT = 50e-6
"""Waits are compared by ratio: below this they count as this, seconds."""


@dataclass(frozen=True)
class StepCurve:
    """Seconds of a step of one sequence by rows, linear in between and beyond; what more sequences and context add."""

    rows: tuple[int, ...]
    """Ascending, from 1."""
    seconds: tuple[float, ...]
    """Never falling."""
    per_sequence: float = 0.0
    """Added by each sequence beyond the first."""
    per_context_token: float = 0.0
    """Added by each token of KV that the step reads."""
    capacities: tuple[int, ...] = ()
    """Rows that steps are captured for: a step costs what the next capacity does. Empty where steps run as they are."""

    def padded(self, rows: np.ndarray) -> np.ndarray:
        """Rows that are computed for so many rows: the next capacity, the rows themselves beyond the last."""
        if not self.capacities:
            return rows
        index = np.searchsorted(self.capacities, rows)
        return np.where(index < len(self.capacities), np.append(self.capacities, 0)[index], rows)

    def alone(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of steps of one sequence with so many rows, padded already."""
        seconds = np.interp(rows, self.rows, self.seconds)
        if len(self.rows) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            seconds = seconds + slope * np.maximum(0, rows - self.rows[-1])
        return seconds

    def extra(self, sequences: int, context_tokens: float) -> float:
        """Seconds that more sequences and their KV add, all sequences together."""
        return self.per_sequence * (sequences - 1) + self.per_context_token * context_tokens


class StepCosts:
    """Predicted seconds of a step, from commands taken to tokens handed out."""

    def __init__(self, curve: StepCurve):
        self._curve = curve
        self._ratio = DriftingRatio(curve.capacities or _KNOTS, _LEVEL_SPREAD, _STEP_SPREAD, _STEP_NOISE)
        self._tabulate(2 * curve.rows[-1])

    @property
    def drift(self) -> float:
        """log of the machine's present slowness, against start."""
        return self._ratio.level

    def predict(self, rows: int, sequences: int, context_tokens: float) -> float:
        """Seconds of a step of so many rows."""
        alone, place = self._alone_at(rows)
        ratio = self._ratio.log_ratio(_key(sequences, context_tokens), place)
        return (alone + self._curve.extra(sequences, context_tokens)) * math.exp(ratio)

    def predict_up_to(
        self, rows: int, more: int, sequences: int, context_tokens: float, optimistic: bool = False
    ) -> np.ndarray:
        """[more + 1] seconds of steps of rows, rows + 1, ..., rows + more rows; never falling.

        Optimistic: where little was measured, a deviation less than it is thought to be. Who chooses by that tries
        what may be best, and knows it then.
        """
        if rows + more >= len(self._alone):
            self._tabulate(2 * (rows + more))
        wanted = slice(rows, rows + more + 1)
        left, right, weight = (table[wanted] for table in self._places)
        ratio = self._ratio.log_ratios(_key(sequences, context_tokens), left, right, weight, float(optimistic))
        seconds = self._alone[wanted] + self._curve.extra(sequences, context_tokens)
        return np.maximum.accumulate(seconds * np.exp(ratio))

    def observe(self, rows: int, sequences: int, context_tokens: float, seconds: float) -> None:
        """A step of these rows took so long."""
        alone, place = self._alone_at(rows)
        curve = alone + self._curve.extra(sequences, context_tokens)
        self._ratio.update(_key(sequences, context_tokens), place, math.log(seconds / curve))

    def _alone_at(self, rows: int) -> tuple[float, Place]:
        """Seconds of such a step of one sequence on the curve, and where it is corrected."""
        if rows >= len(self._alone):
            self._tabulate(2 * rows)
        left, right, weight = self._places
        return float(self._alone[rows]), (int(left[rows]), int(right[rows]), float(weight[rows]))

    def _tabulate(self, rows: int) -> None:
        """What is looked up by rows in every step, for up to so many."""
        count = self._curve.padded(np.maximum(1, np.arange(rows + 1)))
        self._alone = self._curve.alone(count)
        left, right, weight = zip(*(self._ratio.place(float(c)) for c in count), strict=True)
        self._places = np.array(left), np.array(right), np.array(weight)


class DraftCosts:
    """Predicted seconds a step waits for its drafts: sending features and requests, drafting, receiving.

    Where drafting overlaps with other sequences' steps this is the rest that does not. In units of the machine's
    drift, which drafter and verifier share where they share cores. What the second takes sets the scale: a drafter's
    first round takes several times as long.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Another drafter."""
        self._cold = True
        self._ratio = DriftingRatio(_DRAFT_KNOTS, _DRAFT_LEVEL_SPREAD, _DRAFT_SPREAD, _DRAFT_NOISE)

    @property
    def known(self) -> bool:
        return self._ratio.count >= 3

    @property
    def surprised(self) -> bool:
        """Whether the last measurement was far off."""
        return self._ratio.surprised

    def predict(self, sequences: int, nodes: int, drift: float) -> float:
        """Seconds for a draft of so many nodes for each of so many sequences."""
        return self._predict(sequences, nodes, drift, 0.0)

    def optimistic(self, sequences: int, nodes: int, drift: float) -> float:
        """What it may be, as far as it was not measured for such numbers."""
        return self._predict(sequences, nodes, drift, 1.0)

    def observe(self, sequences: int, nodes: int, seconds: float, drift: float, age: int) -> None:
        """A step waited so long for drafts, `age` steps after the last that did."""
        if self._cold:
            self._cold = False
            return
        ratio = math.log(max(seconds, _SMALLEST_WAIT) / _draft_curve(sequences, nodes)) - drift
        self._ratio.update(_draft_key(sequences), self._ratio.place(nodes), ratio, age)

    def _predict(self, sequences: int, nodes: int, drift: float, optimism: float) -> float:
        ratio = self._ratio.log_ratio(_draft_key(sequences), self._ratio.place(nodes), optimism)
        return _draft_curve(sequences, nodes) * math.exp(ratio + drift)


def _draft_curve(sequences: int, nodes: int) -> float:
    """The shape drafting costs are thought to have before they are measured: rounds, then sequences, hardly nodes."""
    return 1e-3 * (1 + sequences * (1 + nodes / 64) / 4)


def _draft_key(sequences: int) -> tuple[int, ...]:
    return (round(2 * math.log2(sequences)),)


def _key(sequences: int, context_tokens: float) -> tuple[int, int]:
    """Sequences and context per sequence, in steps of a factor of the square root of 2 and of 2 (from 256 on)."""
    context = context_tokens / max(1, sequences)
    return round(2 * math.log2(max(1, sequences))), max(8, round(math.log2(max(1.0, context))))
