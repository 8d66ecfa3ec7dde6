"""A step of fixed shape, captured once for each capacity (bucket) and replayed: CUDA graphs, and what to do without.

The user has static buffers and, per bucket, a function without arguments that reads and writes them. Whatever it is
captured with is baked in: it must allocate nothing that outlives it, not wait for the device and read no Python value
that changes. Where a bucket cannot be captured, or is not any more, the same function runs as it is.
"""

import gc
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

import torch

from tandem.errors import StartupError

logger = logging.getLogger(__name__)

Step = Callable[[], None]
Bucket = TypeVar("Bucket", bound=Hashable)
Result = TypeVar("Result")


class Driver(Protocol):
    """Knows how a device captures."""

    captures: bool
    """Whether there is anything to capture with."""

    def warm_up(self, step: Step) -> None:
        """Run a step so that nothing happens for the first time while it is captured: kernels are compiled and tuned,
        communicators and workspaces made."""
        ...

    def capture(self, step: Step) -> Step:
        """What replays the step. All captures share one pool of memory."""
        ...

    def release(self) -> None:
        """Free the pool. Nothing that capture() returned is held any more."""
        ...


class EagerDriver:
    """For devices without graphs: a step is its own replay."""

    captures = False

    def warm_up(self, step: Step) -> None: ...

    def capture(self, step: Step) -> Step:
        return step

    def release(self) -> None: ...


class CudaDriver:
    """CUDA graphs. Warm-up and capture take place on one stream of their own, replay on the caller's.

    Errors of capture are looked for in this thread only: NCCL's watchdog asks for events in another.
    """

    captures = True
    _WARM_UPS = 2

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Step) -> None:
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            for _ in range(self._WARM_UPS):
                step()
        caller.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def capture(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()


def driver_for(device: torch.device) -> Driver:
    """What captures on this device, if anything does."""
    return CudaDriver(device) if device.type == "cuda" else EagerDriver()


class Fallback(Enum):
    """Why a bucket is not captured though the device could."""

    CAPTURE = "capture"
    """Its capture raised."""
    MEMORY = "memory"
    """It, or a smaller one after it, found no memory."""
    REPLAY = "replay"
    """A replay raised."""


@dataclass
class _Entry(Generic[Bucket]):
    bucket: Bucket
    step: Step
    replay: Step | None = None
    fallback: Fallback | None = None
    why: str = ""
    runs: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class BucketState(Generic[Bucket]):
    """A bucket at this moment."""

    bucket: Bucket
    captured: bool
    why: str
    """Why not; empty if captured."""
    runs: int
    """Replays, or runs of a bucket that is not captured; from 0 on when that changes."""
    seconds: float
    """Mean of those, until the results are there; 0 without any."""


@dataclass(frozen=True)
class Ran(Generic[Result]):
    """One run of a bucket."""

    result: Result
    seconds: float
    replayed: bool
    fallback: Fallback | None


class CapturedSteps(Generic[Bucket]):
    """Steps by bucket.

    A capture that raises leaves its bucket uncaptured. One that finds no memory drops the larger buckets too, since
    they were captured before it and hold what it lacks, and goes on with the smaller ones in a new pool. A replay that
    raises is done over without a graph, and its bucket stays without.
    """

    def __init__(self, driver: Driver, eager_fallback: bool = True, together: bool = False):
        """eager_fallback: otherwise a bucket that is not captured is a StartupError. together: other processes run the
        same steps, and wait for each other inside."""
        self._driver = driver
        self._eager_fallback = eager_fallback
        self._together = together
        self._entries: dict[Bucket, _Entry[Bucket]] = {}

    def __iter__(self) -> Iterator[BucketState[Bucket]]:
        """States in order of capture; safe from any thread."""
        for e in list(self._entries.values()):
            captured = self._driver.captures and e.replay is not None
            mean = e.seconds / e.runs if e.runs else 0.0
            yield BucketState(e.bucket, captured, "" if captured else e.why, e.runs, mean)

    def capture(self, steps: Iterable[tuple[Bucket, Step]]) -> None:
        """Capture all of them, in this order: the largest first, so that smaller ones live in its memory. They are
        taken one at a time: before it gives a bucket, the iterator may fill the buffers that bucket runs with.

        StartupError if one fails and may not run eagerly, or if a run outside capture fails where others wait for it.
        """
        for bucket, step in steps:
            why = "" if self._driver.captures else "the device has no graphs"
            entry = self._entries[bucket] = _Entry(bucket, step, why=why)
            self._warm_up(entry)
            if entry.fallback is None:
                try:
                    entry.replay = self._driver.capture(step)
                except Exception as error:
                    self._not_captured(entry, error)

    def run(self, bucket: Bucket, read: Callable[[], Result]) -> Ran[Result]:
        """Run a bucket's step; read() fetches the results, which must be there when it returns."""
        entry = self._entries[bucket]
        started = time.perf_counter()
        if entry.replay:
            try:
                entry.replay()
                return self._ran(entry, read(), started)
            except Exception as error:
                if not self._driver.captures:
                    raise
                self._retire([entry], Fallback.REPLAY, _describe(error))
        started = time.perf_counter()
        entry.step()
        return self._ran(entry, read(), started)

    def _ran(self, entry: _Entry[Bucket], result: Result, started: float) -> Ran[Result]:
        seconds = time.perf_counter() - started
        entry.runs += 1
        entry.seconds += seconds
        return Ran(result, seconds, self._driver.captures and entry.replay is not None, entry.fallback)

    def _warm_up(self, entry: _Entry[Bucket]) -> None:
        try:
            self._driver.warm_up(entry.step)
        except Exception as error:
            if self._together:
                raise StartupError(
                    f"graphs: {entry.bucket}: a run before capture failed, and other ranks wait in it: "
                    f"{_describe(error)}"
                ) from error
            self._not_captured(entry, error)

    def _not_captured(self, entry: _Entry[Bucket], error: Exception) -> None:
        why = _describe(error)
        if not self._eager_fallback:
            raise StartupError(f"graphs: {entry.bucket} is not captured, and eager_fallback is false: {why}") from error
        if not _is_out_of_memory(error):
            self._retire([entry], Fallback.CAPTURE, why)
            return
        self._retire([e for e in self._entries.values() if e.fallback is None], Fallback.MEMORY, why)
        # What was raised holds the frames of the capture, and with them its tensors.
        error.__traceback__ = error.__context__ = None
        self._driver.release()

    def _retire(self, entries: Sequence[_Entry[Bucket]], fallback: Fallback, why: str) -> None:
        for entry in entries:
            entry.replay, entry.fallback, entry.why = None, fallback, f"{fallback.value}: {why}"
            entry.runs, entry.seconds = 0, 0.0
            logger.warning("graphs: %s runs eagerly from now on: %s", entry.bucket, entry.why)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it hides: leaving a capture that failed often raises an error of its own."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    return any(isinstance(e, torch.OutOfMemoryError) for e in _chain(error))


def _describe(error: BaseException) -> str:
    """One line: type and message of what went wrong first."""
    first = list(_chain(error))[-1]
    return f"{type(first).__name__}: {' '.join(str(first).split())}"[:300]
