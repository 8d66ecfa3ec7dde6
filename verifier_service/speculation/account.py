"""What speculation may still lose against plain decoding: a bound that holds whatever the estimates miss."""

from collections import deque
from statistics import median

_SHARE = 0.005
"""Of the time, given to spend."""
_MOST_STEPS, _MOST_TOKENS = 2.0, 16.0
"""Plain steps that are held at most, and what luck adds to that, divided by the sequences: the fewer they are, the more
do the tokens of a step vary. Past gains pay for no more losses than these."""
_AGAIN = 0.25
"""Of the most that must be there before more is risked once all is spent: less would not show what drafts bring."""
_TOLERATED = 1.01
"""What drafts gave counts this much: no estimate of what plain decoding would have taken is surer."""
_RECENT = 15
_OUTLIER = 1.5
"""Times the median of the recent cycles that one is said to have taken at most: plain steps have outliers too, and what
they are compared with does not."""


class LossAccount:
    """Steps that had to do with drafts pay in what they gained over plain decoding, or out what they lost.

    Estimates decide what is worth trying; this says how often they may be wrong. What drafts cost beside rounds and
    steps (catching up, caches, cores that are shared) is in no estimate, but in the time that passes.
    """

    def __init__(self) -> None:
        self._held = 1.0
        """Of the most, so that a changed load keeps its meaning."""
        self._spent_up = False
        self._recent: deque[float] = deque(maxlen=_RECENT)

    @property
    def open(self) -> bool:
        """Whether drafts may be asked for."""
        return not self._spent_up

    def pass_time(self, steps: float, sequences: int) -> None:
        """The time of so many plain steps of these sequences passed."""
        self._add(_SHARE * steps, sequences)

    def settle(self, steps: float, took: float, sequences: int) -> None:
        """Drafts gave what plain decoding takes `steps` plain steps for; it took the time of `took` of them."""
        self._recent.append(took)
        self._add(_TOLERATED * steps - min(took, _OUTLIER * median(self._recent)), sequences)

    def _add(self, steps: float, sequences: int) -> None:
        self._held = min(1.0, self._held + steps / (_MOST_STEPS + _MOST_TOKENS / sequences))
        self._spent_up = self._held < (_AGAIN if self._spent_up else 0.0)
