"""What passes between scheduler, model runner and engine: one step of the target."""

from dataclasses import dataclass, field

import numpy as np

from tandem.draft_tree import Draft
from verifier_service.sequence import Sequence


@dataclass(frozen=True)
class Segment:
    """The rows of one sequence in a step: tokens from its committed length on, then the nodes of its draft.

    Row i is written to KV slot start + i of the sequence; the nodes of a tree stand at positions by depth.
    """

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

    def for_ranks(self) -> "SegmentRows":
        """What it takes to compute the rows."""
        if not self.draft:
            return SegmentRows(self.sequence.id, self.start, self.token_ids, [], self.blocks)
        parents: list[int] = []
        if not self.draft.is_chain:
            root = len(self.token_ids) - 1
            parents = [*range(-1, root), *(root + parent for parent in self.draft.parents)]
        return SegmentRows(self.sequence.id, self.start, self.token_ids + self.draft.tokens, parents, self.blocks)


@dataclass(frozen=True)
class SegmentRows:
    """A segment as every rank of the target computes it."""

    sequence_id: int
    start: int
    token_ids: list[int]
    """Of all rows, nodes included."""
    parents: list[int]
    """Of each row the row above it, -1 for the first; a row sees the prefix, the rows above it and itself. Empty where
    every row sees all rows before it: plain tokens, a chain."""
    blocks: list[int]

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    @property
    def positions(self) -> list[int]:
        """Of each row: the first stands at `start`, every other one behind the row above it."""
        if not self.parents:
            return list(range(self.start, self.start + self.rows))
        positions = [self.start]
        for parent in self.parents[1:]:
            positions.append(positions[parent] + 1)
        return positions

    def slot(self, row: int, block_tokens: int) -> int:
        """The KV slot (block * block_tokens + offset) a row is written to."""
        block, offset = divmod(self.start + row, block_tokens)
        return self.blocks[block] * block_tokens + offset


@dataclass(frozen=True)
class RankStep:
    """A step as rank 0 tells it to the others."""

    moves: list[tuple[int, int]]
    """(from, to) KV slots, to be made before the rows are computed: what the last step's walks accepted."""
    segments: list[SegmentRows]
    logit_rows: list[int]
    """Rows of the step that choose a token, ascending."""


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
    """Rows of the segment that are committed now, in position order: all tokens, then the accepted nodes. The model
    runner has moved their KV and features to the sequence's slots from its start on."""
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
    routing: np.ndarray | None = None
    """[mixtures, rows, experts per token] int64: the experts that rows went to, without padding; None for a dense
    target."""
    replay_seconds: float | None = None
    """Of a captured step; None if it was not replayed."""
    fallback: str | None = None
    """Why it was not, where steps are captured."""
