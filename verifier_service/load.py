"""Live figures of the verifier: where recent steps' time went, and totals since start."""

import threading
from collections import deque
from dataclasses import dataclass, field, fields
from statistics import median

from tandem.step_timing import StepTiming
from verifier_service.last_draft import VerifiedDraft
from verifier_service.speculation.present import Present


@dataclass
class Totals:
    """Counters since start."""

    emitted: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """Entry k: drafts whose node at depth k + 1 was accepted."""

    def count_draft(self, drafted: int, accepted: int) -> None:
        """One sequence's draft was verified."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        per_position = self.accepted_per_position
        per_position.extend([0] * (accepted - len(per_position)))
        for depth in range(accepted):
            per_position[depth] += 1


@dataclass(frozen=True)
class GraphBucket:
    """A capacity that steps are captured for."""

    rows: int
    sequences: int
    captured: bool
    why: str
    """Why not; empty if captured."""
    runs: int
    """Replays, or runs of a bucket that is not captured."""
    seconds: float
    """Mean of those; 0 without any."""


@dataclass(frozen=True)
class Load:
    """A snapshot."""

    running: int
    waiting: int
    kv_used: int
    kv_cached: int
    kv_total: int
    drafters: int
    drafter_names: list[str]
    drafted_step: StepTiming | None
    """Medians of recent decode steps with a draft; None before the first."""
    plain_step: StepTiming | None
    """Medians of recent decode steps without."""
    totals: Totals
    speculation: Present
    buckets: list[GraphBucket]
    """Largest first; empty where steps are not of fixed shape."""
    last_draft: VerifiedDraft | None
    """None before the first, and where it is not kept."""


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
