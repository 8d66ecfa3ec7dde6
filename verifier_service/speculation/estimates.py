"""A running estimate of how measured times relate to a curve, on a machine whose speed drifts."""

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

Place = tuple[int, int, float]
"""Where a point lies: the knots on both sides and how far it is to the right one, 0 to 1."""

_DRIFT = 0.01
"""What the level may move per measurement."""
_WEAR = 0.005
"""What a correction may move per measurement of its key elsewhere: what was not measured for long is known less. The
correction of what is measured does not move, so that drift is the level's."""
_LEVEL_SPREAD = 0.5
"""Most that is thought of the level's own uncertainty while nothing is measured."""
_CHANGED = 3
"""Measurements off by three deviations, in a row and to the same side, that count as a change rather than as
outliers."""
_STRANGE = 8
"""Distance of keys from which on the one says nothing of how sure the other's corrections are."""


class DriftingRatio:
    """log(measured / curve), as a level that all points share plus a correction per key and knot.

    The level follows the machine's drift within some ten measurements, so that whatever is measured keeps all
    predictions current; a correction says how one bucket differs from the others, and settles. A Kalman filter with a
    diagonal covariance: what is uncertain takes most of an error. Errors beyond three deviations are cut to one, unless
    they come in a row; then the smallest of them is believed.
    """

    def __init__(self, knots: Sequence[float], level_spread: float, correction_spread: float, noise: float):
        """knots: points between which corrections are interpolated linearly in log x.

        Spreads: standard deviations of what level and corrections may be before anything is measured; noise: of one
        measurement (all of logs: 0.12 is about 12 %).
        """
        self._knots = [math.log(knot) for knot in knots]
        self._noise = noise
        self._spread = correction_spread
        self._tables: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
        self._outliers: list[float] = []
        """The latest errors, as far as each was beyond three deviations and to the same side."""
        self.count = 0
        """Measurements so far."""
        self.level = 0.0
        self._level_variance = level_spread**2

    @property
    def surprised(self) -> bool:
        """Whether the last measurement was beyond three deviations: an outlier, or a change that was believed or may
        be."""
        return bool(self._outliers)

    def place(self, x: float) -> Place:
        """Where x lies."""
        knots, at = self._knots, math.log(x)
        last = len(knots) - 1
        left = bisect_right(knots, at) - 1
        if left < 0 or left >= last:
            end = min(max(left, 0), last)
            return end, min(end + 1, last), 0.0
        return left, left + 1, (at - knots[left]) / (knots[left + 1] - knots[left])

    def log_ratio(self, key: tuple[int, ...], place: Place, optimism: float = 0.0) -> float:
        """The estimate there, less so many standard deviations of the correction: of how little is known beyond the
        level."""
        values, variances = self._table(key)
        left, right, weight = place
        before, after = (self.level + values[i] - optimism * math.sqrt(variances[i]) for i in (left, right))
        return before + weight * (after - before)

    def log_ratios(
        self, key: tuple[int, ...], left: np.ndarray, right: np.ndarray, weight: np.ndarray, optimism: float = 0.0
    ) -> np.ndarray:
        """The same at many places."""
        values, variances = (np.array(part) for part in self._table(key))
        at_knots = self.level + values - optimism * np.sqrt(variances)
        before = at_knots[left]
        return before + weight * (at_knots[right] - before)

    def update(self, key: tuple[int, ...], place: Place, log_ratio: float, age: int = 1) -> None:
        """Take in a measurement; `age`: steps since the one before, in which the level may have drifted."""
        values, variances = self._table(key)
        left, right, weight = place
        weights = {left: 1.0 - weight}
        if weight:
            weights[right] = weight
        if self.count:
            drifted = self._level_variance + age * _DRIFT**2
            self._level_variance = min(drifted, max(self._level_variance, _LEVEL_SPREAD**2))
        error = log_ratio - self.level - sum(w * values[i] for i, w in weights.items())
        unexplained = sum(w * w * variances[i] for i, w in weights.items()) + self._noise**2
        deviation = math.sqrt(self._level_variance + unexplained)
        if abs(error) <= 3 * deviation:
            self._outliers = []
        else:
            alike = [past for past in self._outliers if past * error > 0]
            self._outliers = [*alike[1 - _CHANGED :], error]
            if len(self._outliers) < _CHANGED:
                error = math.copysign(deviation, error)
            else:
                error = min(self._outliers, key=abs)
                self._level_variance = error * error
        total = self._level_variance + unexplained
        for i, w in weights.items():
            gain = w * variances[i] / total
            values[i] += gain * error
            variances[i] *= 1 - gain * w
            variances[i] -= _WEAR**2
        most = self._spread**2
        variances[:] = [min(max(variance + _WEAR**2, 0.0), most) for variance in variances]
        gain = self._level_variance / total
        self.level += gain * error
        self._level_variance *= 1 - gain
        self.count += 1

    def _table(self, key: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """Corrections and their variances. A new key starts from its nearest neighbour's, the less sure of them the
        further it is."""
        table = self._tables.get(key)
        if table is None:
            values, variances = [0.0] * len(self._knots), [self._spread**2] * len(self._knots)
            if self._tables:
                distances = {k: sum(abs(a - b) for a, b in zip(k, key, strict=True)) for k in self._tables}
                nearest = min(distances, key=distances.__getitem__)
                values = self._tables[nearest][0].copy()
                least = self._spread**2 * min(1.0, distances[nearest] / _STRANGE)
                variances = [max(variance, least) for variance in self._tables[nearest][1]]
            table = self._tables[key] = values, variances
        return table
