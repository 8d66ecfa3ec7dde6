"""From rounds to drafts without a draft model: keeps each sequence's text, drafts from it."""

import time
from collections.abc import Sequence

from drafter_service.context_store import ContextStore
from drafter_service.messages import Answer, Gap, ProtocolError
from drafter_service.metrics import DrafterMetrics
from drafter_service.ngram import NgramIndex
from tandem.config import DrafterConfig
from tandem.draft_tree import Draft
from tandem.speculation import Context, DraftRequest, DraftShape, Round, SequenceDraft


class NgramDrafter:
    """Drafts for one verifier's stream. Not thread-safe."""

    def __init__(self, section: DrafterConfig, vocab_size: int, metrics: DrafterMetrics):
        """section: its ngram_ keys are used."""
        self._section = section
        self._vocab_size = vocab_size
        self._store: ContextStore[NgramIndex] = ContextStore(lambda: NgramIndex(section.ngram_max, section.ngram_min))
        self._metrics = metrics

    def work(self, rounds: Sequence[Round]) -> Answer:
        """All rounds in order. Each request is answered, with an empty draft where the text suggests nothing.

        Of several requests for one sequence only the last is served: the verifier asks again when it has moved on.
        ProtocolError for a round that breaks the protocol; the stream must end then.
        """
        started = time.perf_counter()
        requests: dict[int, DraftRequest] = {}
        gaps: dict[int, Gap] = {}
        for round_ in rounds:
            for context in round_.contexts:
                self._take(context, gaps)
            for request in round_.requests:
                self._check(request)
                requests[request.sequence_id] = request
            for sequence_id in round_.released_sequence_ids:
                self._store.release(sequence_id)
                requests.pop(sequence_id, None)
                gaps.pop(sequence_id, None)
        drafts = self._draft(list(requests.values()), gaps)
        self._metrics.rounds.inc(len(rounds))
        self._metrics.context_gaps.inc(len(gaps))
        self._metrics.sequences.set(len(self._store))
        return Answer(drafts, list(gaps.values()), int((time.perf_counter() - started) * 1e6))

    def _take(self, context: Context, gaps: dict[int, Gap]) -> None:
        if len(context.token_ids) != context.count:
            raise ProtocolError(
                f"contexts.token_ids: sequence {context.sequence_id} has {len(context.token_ids)}, "
                f"must be count, {context.count}"
            )
        index = self._store.extend(context.sequence_id, context.epoch, context.start_position, context.count)
        if isinstance(index, Gap):
            gaps[context.sequence_id] = index
        elif index is not None:
            # Positions may come again; a sequence's tokens never change within an epoch.
            new = context.token_ids[len(index) - context.start_position :]
            index.extend(new)
            self._metrics.context_positions.inc(len(new))

    def _check(self, request: DraftRequest) -> None:
        if request.anchor >= self._vocab_size:
            raise ProtocolError(f"requests.anchor: must be below vocab_size {self._vocab_size}, is {request.anchor}")
        if request.max_nodes < 1:
            raise ProtocolError(f"requests.max_nodes: must be at least 1, is {request.max_nodes}")

    def _draft(self, requests: list[DraftRequest], gaps: dict[int, Gap]) -> list[SequenceDraft]:
        """Drafts of the requests whose text is complete; the others' gaps are added to `gaps`."""
        started = time.perf_counter()
        found: list[SequenceDraft] = []
        for request in requests:
            index = self._store.behind(request.sequence_id, request.epoch, request.base_position)
            if index is None:
                self._metrics.stale_requests.inc()
            elif isinstance(index, Gap):
                gaps[request.sequence_id] = index
            else:
                draft = self._draft_one(index, request)
                found.append(SequenceDraft(request.sequence_id, request.epoch, request.base_position, draft))
        if found:
            self._metrics.forward_seconds.observe(time.perf_counter() - started)
            self._metrics.batch_size.observe(len(found))
            self._metrics.drafts.inc(len(found))
            self._metrics.empty_drafts.inc(sum(not d.draft for d in found))
            self._metrics.draft_tokens.inc(sum(len(d.draft) for d in found))
        return found

    def _draft_one(self, index: NgramIndex, request: DraftRequest) -> Draft:
        nodes = request.max_nodes
        if request.shape is DraftShape.BLOCK:
            nodes = min(nodes, self._section.ngram_block_size - 1)
        return index.draft(request.anchor, nodes, request.shape)
