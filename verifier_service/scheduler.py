"""Which sequences step now. Pure Python: knows no tensors and no RPC.

A sequence with more than one uncommitted token is prefilling, in chunks; with exactly one (its anchor) it decodes, with
the nodes of its draft if it has one. Both kinds of rows share a step. With overlap, sequences whose drafts are still on
their way are left out while others can step, so drafting one cohort overlaps with verifying another. Without, a step
waits for all drafts: better where drafter and verifier share the same cores.
"""

from collections import deque
from collections.abc import Callable

from tandem.draft_tree import Draft
from tandem.errors import Overloaded
from verifier_service.kv_cache import KvCache
from verifier_service.sequence import Sequence
from verifier_service.step import Segment, StepPlan

Budget = Callable[[list[Sequence], int], dict[Sequence, int]]
"""(sequences that decode in the next step, rows of prompts in it) -> nodes to verify of those that have a draft."""


class Scheduler:
    """Admission, chunked prefill, continuous batching, preemption by recompute."""

    def __init__(
        self,
        kv: KvCache,
        max_running: int,
        max_waiting: int,
        max_prefill_rows: int,
        draft_timeout_seconds: float,
        overlap: bool,
        budget: Budget,
    ):
        self.kv = kv
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of admission."""
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_prefill_rows = max_prefill_rows
        self._draft_timeout = draft_timeout_seconds
        self._overlap = overlap
        self._budget = budget

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; Overloaded if the queue is full."""
        if len(self.waiting) + len(self.running) >= self._max_waiting + self._max_running:
            raise Overloaded(f"verifier: {len(self.waiting)} sequences are waiting, the most it queues", 1.0)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, and give its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.kv.close(sequence.id)
        else:
            self.waiting.remove(sequence)

    def plan(self, now: float) -> StepPlan:
        """The next step. Admits, reserves the blocks of every row, preempts the newest if there is no room."""
        self._admit()
        awaited = {s: deadline for s in self.running if (deadline := self._deadline(s)) > now}
        wake_at = min(awaited.values(), default=None)
        if awaited and not self._overlap:
            return StepPlan(wake_at=wake_at)
        preempted: list[Sequence] = []
        segments: list[Segment] = []
        prefill_rows = self._max_prefill_rows
        stepping = [s for s in self.running if s not in awaited]
        prompt_rows = min(prefill_rows, sum(s.uncommitted for s in stepping if s.uncommitted > 1))
        nodes = self._budget([s for s in stepping if s.uncommitted == 1], prompt_rows)
        for sequence in stepping:
            if sequence in preempted:
                continue
            if sequence.uncommitted > 1:
                count = min(sequence.uncommitted, prefill_rows)
                if count == 0:
                    continue
                segment = self._segment(sequence, count, None, preempted)
                prefill_rows -= count if segment else 0
            else:
                draft = sequence.pending.draft if sequence.pending else None
                segment = self._segment(sequence, 1, draft.truncated(nodes[sequence]) if draft else None, preempted)
            if segment:
                segments.append(segment)
        segments = [s for s in segments if s.sequence not in preempted]
        return StepPlan(segments, None if segments else wake_at, preempted)

    def audit(self) -> None:
        """AssertionError unless every running sequence has room for what it committed and nobody else holds blocks."""
        self.kv.audit({s.id: s.committed for s in self.running})
        assert not set(map(id, self.running)) & set(map(id, self.waiting)), "a sequence is running and waiting"

    def _deadline(self, sequence: Sequence) -> float:
        """Until when the sequence waits for its draft; 0 if it does not."""
        pending = sequence.pending
        return pending.requested_at + self._draft_timeout if pending and pending.draft is None else 0.0

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            if self.kv.blocks_for(len(sequence.tokens) + 1) > self.kv.available:
                return
            self.waiting.popleft()
            sequence.committed = self.kv.open(sequence.id, sequence.tokens, sequence.request.speculates)
            if sequence.epoch == 0:
                sequence.cached_prompt_tokens = min(sequence.committed, sequence.request.prompt_length)
            self.running.append(sequence)

    def _segment(
        self, sequence: Sequence, count: int, draft: Draft | None, preempted: list[Sequence]
    ) -> Segment | None:
        """Rows for a sequence with room reserved; None if the sequence itself had to give way."""
        end = sequence.committed + count
        if draft and not self.kv.reserve(sequence.id, end + len(draft)):
            draft = None
        while not self.kv.reserve(sequence.id, end):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return None
        return Segment(
            sequence=sequence,
            start=sequence.committed,
            token_ids=sequence.tokens[sequence.committed : end],
            draft=draft or None,
            samples=end == len(sequence.tokens),
            blocks=self.kv.table(sequence.id),
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Start over later: the tokens so far become its prompt. Chosen tokens stay chosen."""
        self.running.remove(sequence)
        self.kv.close(sequence.id)
        sequence.committed = 0
        sequence.epoch += 1
        sequence.pending = None
        self.waiting.appendleft(sequence)
