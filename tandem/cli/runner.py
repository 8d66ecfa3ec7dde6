"""Runs a command's coroutine such that Ctrl-C and SIGTERM end it in order."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """The coroutine was ended by this signal; its clean-up is done."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run. SIGINT and SIGTERM cancel `main`, a second one its clean-up; then raises Interrupted."""
    received: list[int] = []

    async def watched() -> T:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()

        def cancel(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, cancel, number)
        return await task

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
