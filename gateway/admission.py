"""How many generations run at once, and how they end when the gateway does."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from tandem.errors import Overloaded, Unavailable


class Admission:
    """Slots for generations. For one event loop."""

    def __init__(self, max_concurrent: int):
        self._max_concurrent = max_concurrent
        self._running: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Slots that are taken."""
        return len(self._running)

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """The current task holds a slot inside; Overloaded if none is free, Unavailable while the gateway shuts down
        (also from inside, once the calls in flight are ended)."""
        if self._closed:
            raise Unavailable("the gateway is shutting down")
        if self.in_flight >= self._max_concurrent:
            raise Overloaded(f"the gateway runs {self._max_concurrent} generations already, its limit", 1.0)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise Unavailable("the gateway shut down before the generation ended") from None
        finally:
            self._running.discard(task)
            self._ended.discard(task)
            if not self._running:
                self._idle.set()

    async def drain(self, grace_seconds: float) -> None:
        """Refuse new generations, wait for those in flight, end those that take longer."""
        self._closed = True
        if not self._running:
            return
        self._idle.clear()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._idle.wait()
        except TimeoutError:
            self._ended = set(self._running)
            for task in self._ended:
                task.cancel()
            await self._idle.wait()
