"""What every kind of drafter does with the rounds of its stream, whatever it drafts with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from drafter_service.context_store import ContextStore
from drafter_service.messages import Answer, Gap, ProtocolError
from drafter_service.metrics import DrafterMetrics
from tandem.draft_tree import Draft
from tandem.speculation import Context, DraftRequest, Round, SequenceDraft

Storage = TypeVar("Storage")


@dataclass(frozen=True)
class Work(Generic[Storage]):
    """What some rounds ask for, taken together."""

    store: ContextStore[Storage]
    rounds: int
    requests: dict[int, DraftRequest] = field(default_factory=dict)
    """By sequence: of several requests for one only the last, since the verifier asks again when it has moved on."""
    gaps: dict[int, Gap] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rounds: Sequence[Round],
        store: ContextStore[Storage],
        vocab_size: int,
        take: Callable[[Context], Gap | None],
    ) -> "Work[Storage]":
        """Hands every context to `take`. ProtocolError for what breaks the protocol; the stream must end then."""
        work = cls(store, len(rounds))
        for round_ in rounds:
            for context in round_.contexts:
                gap = take(context)
                if gap:
                    work.gaps[context.sequence_id] = gap
            for request in round_.requests:
                _check(request, vocab_size)
                work.requests[request.sequence_id] = request
            for sequence_id in round_.released_sequence_ids:
                store.release(sequence_id)
                work.requests.pop(sequence_id, None)
                work.gaps.pop(sequence_id, None)
        return work

    def ready(self, metrics: DrafterMetrics) -> list[tuple[DraftRequest, Storage]]:
        """The requests whose context is complete; the others' gaps are added to `gaps`."""
        ready: list[tuple[DraftRequest, Storage]] = []
        for request in self.requests.values():
            storage = self.store.behind(request.sequence_id, request.epoch, request.base_position)
            if storage is None:
                metrics.stale_requests.inc()
            elif isinstance(storage, Gap):
                self.gaps[request.sequence_id] = storage
            else:
                ready.append((request, storage))
        return ready

    def answer(
        self, requests: Sequence[DraftRequest], drafts: Sequence[Draft], seconds: float, metrics: DrafterMetrics
    ) -> Answer:
        """With one draft per request served, `seconds` after the rounds were taken up."""
        metrics.rounds.inc(self.rounds)
        metrics.context_gaps.inc(len(self.gaps))
        metrics.sequences.set(len(self.store))
        found = [
            SequenceDraft(r.sequence_id, r.epoch, r.base_position, draft)
            for r, draft in zip(requests, drafts, strict=True)
        ]
        return Answer(found, list(self.gaps.values()), int(seconds * 1e6))


def count_drafts(drafts: Sequence[Draft], seconds: float, metrics: DrafterMetrics) -> None:
    """Drafts that were made together, in so many seconds."""
    metrics.forward_seconds.observe(seconds)
    metrics.batch_size.observe(len(drafts))
    metrics.drafts.inc(len(drafts))
    metrics.empty_drafts.inc(sum(not draft for draft in drafts))
    metrics.draft_tokens.inc(sum(map(len, drafts)))


def _check(request: DraftRequest, vocab_size: int) -> None:
    if request.anchor >= vocab_size:
        raise ProtocolError(f"requests.anchor: must be below vocab_size {vocab_size}, is {request.anchor}")
    if request.max_nodes < 1:
        raise ProtocolError(f"requests.max_nodes: must be at least 1, is {request.max_nodes}")
