"""Where time goes, by parts that lie inside each other: each is charged its own time, not that of what it calls."""

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Ledger:
    """Seconds by part, of one thread. What is inside no part is `outermost`'s."""

    def __init__(self, outermost: str, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._open = [outermost]
        self._seconds: dict[str, float] = {}
        self._charged_until = clock()

    def timed(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, whose time is charged to `part`."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            self._charge()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._open.pop()

        return run

    def move(self, seconds: float, part: str) -> None:
        """Charge `part` with time that was charged to the present one: what a library measured of itself."""
        self._charge()
        self._seconds[self._open[-1]] -= seconds
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """What was charged since the last call."""
        self._charge()
        taken, self._seconds = self._seconds, {}
        return taken

    def _charge(self) -> None:
        now = self._clock()
        part = self._open[-1]
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._charged_until
        self._charged_until = now
