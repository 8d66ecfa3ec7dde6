"""What services tell of a request's life to whoever records it; tandem/tracing.py does. Nothing here knows how.

Times are those of time.perf_counter(). Never told: text and token ids.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tandem.config import TracingConfig
    from tandem.tracing import Tracing


outgoing_metadata: ContextVar[tuple[tuple[str, str], ...] | None] = ContextVar("outgoing_metadata", default=None)
"""gRPC metadata with which a call goes on with the trace of the request it is made for."""


@dataclass(frozen=True)
class DecodeStep:
    """What one step did for one sequence that decodes."""

    started: float
    ended: float
    mode: str
    """How drafts are used for the sequence."""
    sequences: int
    """Of the step."""
    rows: int
    """Of the step, of all sequences."""
    bucket: int
    """Rows that were computed, padding included."""
    nodes: int
    """Of the sequence's draft, verified."""
    accepted: int
    tokens: int
    """Emitted for the sequence."""
    asked: bool
    """Whether a draft had been asked for the step,"""
    draft_recorded: bool
    """and its span is recorded."""


class DraftSpan(Protocol):
    """A draft that was asked for."""

    traceparent: str
    """For the drafter."""

    def end(self, outcome: str, nodes: int = 0, compute_us: int = 0) -> None:
        """outcome: "drafted", "late" or "lost"."""
        ...


class SequenceSpans(Protocol):
    """Of one sequence, called by the thread that runs it."""

    def queued(self, came: float, started: float) -> None:
        """Its first step started."""
        ...

    def prefilled(self, ended: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Its prompt is in the KV."""
        ...

    def asked(self) -> DraftSpan | None:
        """A draft is asked for; None if this one is not recorded."""
        ...

    def stepped(self, step: DecodeStep) -> None:
        """Steps, and the drafts they verify, are recorded or not together."""
        ...


def start_tracing(config: "TracingConfig | None", service: str) -> "Tracing | None":
    """None where the config has no `tracing:`. StartupError if OpenTelemetry is not installed."""
    if config is None:
        return None
    # Only here: what is not switched on is not loaded.
    from tandem.errors import StartupError

    try:
        from tandem.tracing import Tracing
    except ModuleNotFoundError as error:
        missing = f"OpenTelemetry ({error.name} is missing)"
        raise StartupError(f"tracing: needs {missing}: pip install 'tandem[tracing]'") from None
    return Tracing(config, service)
