"""One generation in the verifier."""

from dataclasses import dataclass, field
from enum import Enum

from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from tandem.spans import DraftSpan, SequenceSpans
from tandem.speculation import DraftShape, SpeculationMode


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True)
class SequenceRequest:
    """What is asked of the verifier, checked by the servicer."""

    request_id: str
    token_ids: list[int]
    """Prompt, then tokens that were generated before (a resumed generation)."""
    prompt_length: int
    sampling: SamplingParams
    max_tokens: int
    """Tokens to emit at most, counted from prompt_length."""
    stop_token_ids: frozenset[int] = frozenset()
    speculation_mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_nodes: int = 32
    """Nodes verified per step at most."""
    log_probs: bool = False
    spans: SequenceSpans | None = None
    """Where to tell its life; None for most."""

    @property
    def speculates(self) -> bool:
        """Whether it may be drafted for; if not, no features are computed either."""
        return self.speculation_mode is not SpeculationMode.OFF


@dataclass
class AcceptanceCounts:
    """Speculation figures of one sequence."""

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def count_step(self, drafted: int, accepted: int, depth: int) -> None:
        """One decode step that verified `drafted` nodes, the deepest at `depth`, and accepted `accepted` of them."""
        self.steps += 1
        if drafted == 0:
            return
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        missing = depth - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * max(0, missing))
        for depth in range(accepted):
            self.accepted_per_position[depth] += 1


@dataclass
class PendingDraft:
    """A draft that was asked for: from the request until it is verified or given up."""

    base_position: int
    max_nodes: int
    shape: DraftShape
    requested_at: float
    """time.perf_counter()"""
    primed: bool
    """The drafter held all but what one step commits: its time is that of a draft alone."""
    draft: Draft | None = None
    """Without nodes: the drafter has nothing to propose."""
    compute_us: int = 0
    """The drafter's own time."""
    span: DraftSpan | None = None


@dataclass(eq=False)
class Sequence:
    """State of one generation. tokens[i] sits at position i; tokens[:committed] are in the target's KV."""

    id: int
    request: SequenceRequest
    tokens: list[int]
    committed: int = 0
    epoch: int = 0
    """Restarts: preemption by recompute adds one."""
    pending: PendingDraft | None = None
    cached_prompt_tokens: int = 0
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    finish_reason: FinishReason | None = None
    queued_at: float | None = None
    """time.perf_counter() of its coming, until its first step."""
    last_emission: float | None = None
    """time.perf_counter() of the end of the step that last emitted."""

    @classmethod
    def from_request(cls, sequence_id: int, request: SequenceRequest) -> "Sequence":
        return cls(sequence_id, request, list(request.token_ids))

    @property
    def uncommitted(self) -> int:
        """Known tokens not yet in the KV: more than one while prefilling, one (the anchor) while decoding."""
        return len(self.tokens) - self.committed

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.request.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_tokens - self.emitted

    def append(self, token_ids: list[int]) -> list[int]:
        """Append chosen tokens up to the first that ends the sequence; returns those appended, sets finish_reason."""
        kept: list[int] = []
        for token in token_ids:
            self.tokens.append(token)
            kept.append(token)
            if token in self.request.stop_token_ids:
                self.finish_reason = FinishReason.STOP
            elif self.remaining <= 0:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                break
        return kept
