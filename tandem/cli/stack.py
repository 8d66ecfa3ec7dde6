"""Runs the parts of a stack as child processes: starts, watches, restarts and stops them, and leaves none behind."""

import asyncio
import contextlib
import functools
import logging
import signal
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.cli.child import Child
from tandem.cli.parts import Part
from tandem.rpc import channel_options

log = logging.getLogger(__name__)

STOP_ORDER = ("gateway", "drafter", "verifier")
"""So that no request reaches a part that is gone; other names go last."""

RESTART_FIRST_SECONDS, RESTART_MAX_SECONDS, STEADY_SECONDS = 0.5, 10.0, 30.0
"""The pause before a restart doubles from the first to the longest, and starts anew after a steady run."""


class StackFailed(RuntimeError):
    """A part that the stack needs ended, or did not become ready; the message names it."""


class Stack:
    """`async with Stack(parts, on_line) as stack:` the body runs once all parts are SERVING; all are gone after it.

    An essential part that ends, and any part that ends before all are ready, ends the stack; others are started again.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        on_line: Callable[[str, str], None],
        ready_timeout_seconds: float = 600.0,
    ):
        """on_line gets (part's name, line) for each line a part writes."""
        self.parts = list(parts)
        self.failure: str | None = None
        """Why the stack failed, once it has."""
        self._on_line = on_line
        self._ready_timeout = ready_timeout_seconds
        self._children: dict[str, Child] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._ready = False
        self._failed = asyncio.Event()

    async def __aenter__(self) -> "Stack":
        try:
            for part in self.parts:
                await self._start(part)
                self._keepers.append(asyncio.create_task(self._keep(part), name=f"keep {part.name}"))
            await self._until_ready()
        except BaseException:
            await self.stop()
            raise
        self._ready = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def wait(self) -> None:
        """Until an essential part ends: then StackFailed."""
        await self._failed.wait()
        raise StackFailed(self.failure)

    async def stop(self) -> None:
        """Ends all parts in STOP_ORDER, by SIGTERM, after their grace by SIGKILL; if cancelled, by SIGKILL at once."""
        for keeper in self._keepers:
            keeper.cancel()
        try:
            await asyncio.gather(*self._keepers, return_exceptions=True)
            for part in sorted(self.parts, key=_stop_rank):
                if (child := self._children.get(part.name)) is not None:
                    log.info("stopping %s", part.name)
                    if not await child.end(part.grace_seconds):
                        log.warning("%s did not end within %g s and was killed", part.name, part.grace_seconds)
                    del self._children[part.name]
        finally:
            for child in self._children.values():
                child.kill()
            self._children.clear()

    async def _start(self, part: Part) -> None:
        log.info("starting %s", part.name)
        starting = asyncio.create_task(Child.start(part.command, functools.partial(self._on_line, part.name)))
        try:
            self._children[part.name] = await asyncio.shield(starting)
        except asyncio.CancelledError:
            (await starting).kill()  # it would run on unseen
            raise

    async def _keep(self, part: Part) -> None:
        """When the part ends: ends the stack, or starts the part again."""
        pause = RESTART_FIRST_SECONDS
        while True:
            started = time.monotonic()
            ended = f"{part.name} ended {_how(await self._children[part.name].wait())}"
            del self._children[part.name]
            if part.essential or not self._ready:
                self.failure = self.failure or ended
                self._failed.set()
                return
            if time.monotonic() - started >= STEADY_SECONDS:
                pause = RESTART_FIRST_SECONDS
            log.warning("%s; the stack runs on without it; starting it again in %g s", ended, pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, RESTART_MAX_SECONDS)
            await self._start(part)

    async def _until_ready(self) -> None:
        """All health services of all parts SERVING, else StackFailed."""
        waits = {
            asyncio.create_task(_serving(part.health_address, service)): part
            for part in self.parts
            for service in part.health_services
        }
        failed = asyncio.create_task(self._failed.wait())
        pending: set[asyncio.Task[Any]] = set(waits)
        try:
            async with asyncio.timeout(self._ready_timeout):
                while pending:
                    done, _ = await asyncio.wait({*pending, failed}, return_when=asyncio.FIRST_COMPLETED)
                    if failed in done:
                        raise StackFailed(f"{self.failure} before the stack was ready")
                    for task in done:
                        task.result()
                    pending -= done
        except TimeoutError:
            names = sorted({waits[task].name for task in pending})
            raise StackFailed(f"{', '.join(names)}: not serving after {self._ready_timeout:g} s") from None
        finally:
            for task in (*waits, failed):
                task.cancel()
            await asyncio.gather(*waits, failed, return_exceptions=True)


async def _serving(address: str, service: str) -> None:
    """Returns once `address` says SERVING; waits on the health stream, through connection failures."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                request = health_pb2.HealthCheckRequest(service=service)
                async for reply in health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True):
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            await asyncio.sleep(0.1)


def _stop_rank(part: Part) -> int:
    return STOP_ORDER.index(part.name) if part.name in STOP_ORDER else len(STOP_ORDER)


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
