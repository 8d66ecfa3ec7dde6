"""How many generations run at once."""

import contextlib
from collections.abc import Iterator

from tandem.errors import Overloaded


class Admission:
    """Slots for generations. For one event loop."""

    def __init__(self, max_concurrent: int):
        self._max_concurrent = max_concurrent
        self.in_flight = 0

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot inside; Overloaded if none is free."""
        if self.in_flight >= self._max_concurrent:
            raise Overloaded(f"the gateway runs {self._max_concurrent} generations already, its limit", 1.0)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
