"""Live figures of the verifier: where recent steps' time went, and totals since start."""

import threading
from collections import deque
from dataclasses import dataclass, fields
from statistics import median

from tandem.step_timing import StepTiming
from verifier_service.speculation.present import Present


@dataclass
class Totals:
    """Counters since start."""

    emitted: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Load:
    """A snapshot."""

    running: int
    waiting: int
    kv_used: int
    kv_cached: int
    kv_total: int
    drafters: int
    drafted_step: StepTiming | None
    """Medians of recent decode steps with a draft; None before the first."""
    plain_step: StepTiming | None
    """Medians of recent decode steps without."""
    totals: Totals
    speculation: Present


class RecentSteps:
    """Timings of the last steps; written by the engine, read from any thread."""

    def __init__(self, keep: int = 512):
        self._lock = threading.Lock()
        self._steps: dict[bool, deque[StepTiming]] = {True: deque(maxlen=keep), False: deque(maxlen=keep)}

    def add(self, timing: StepTiming) -> None:
        with self._lock:
            self._steps[timing.drafted > 0].append(timing)

    def median(self, drafted: bool) -> StepTiming | None:
        with self._lock:
            steps = list(self._steps[drafted])
        if not steps:
            return None
        return StepTiming(*(round(median(getattr(s, f.name) for s in steps)) for f in fields(StepTiming)))
