"""What passes between scheduler, model runner and engine: one step of the target."""

from dataclasses import dataclass, field

from tandem.draft_tree import Draft
from verifier_service.sequence import Sequence


@dataclass(frozen=True)
class Segment:
    """The rows of one sequence in a step: tokens from its committed length on, then the nodes of its draft."""

    sequence: Sequence
    start: int
    """Position of the first row: the sequence's committed length."""
    token_ids: list[int]
    """Known tokens to commit, at least one."""
    draft: Draft | None
    """Nodes to verify after the last token; only on segments that sample."""
    samples: bool
    """Whether the last token is the newest one, so that the next token is chosen."""
    blocks: list[int]
    """The sequence's KV block table, with room for all rows."""

    @property
    def nodes(self) -> int:
        return len(self.draft) if self.draft else 0

    @property
    def rows(self) -> int:
        return len(self.token_ids) + self.nodes


@dataclass(frozen=True)
class StepPlan:
    """What to do next."""

    segments: list[Segment] = field(default_factory=list)
    wake_at: float | None = None
    """Without segments: when to plan again at the latest (time.perf_counter()); None waits for an event."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that lost their blocks and start over."""


@dataclass(frozen=True)
class Verdict:
    """What a step decided for one segment."""

    accepted_rows: list[int]
    """Rows of the segment that are committed now, in position order: all tokens, then the accepted nodes."""
    token_ids: list[int]
    """Chosen tokens: those of the accepted nodes, then the bonus; empty if the segment does not sample."""
    log_probs: list[float]
    """One per chosen token if asked for: log-probability before temperature and filters."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of a step."""

    verdicts: list[Verdict]
    """One per segment."""
    rows: int
    """Rows computed, padding included."""
    forward_seconds: float
    """The target's forward with its head."""
