"""From rounds to drafts without a draft model: keeps each sequence's text, drafts from it."""

import time
from collections.abc import Sequence

from drafter_service.context_store import ContextStore
from drafter_service.messages import Answer, Gap, ProtocolError
from drafter_service.metrics import DrafterMetrics
from drafter_service.ngram import NgramIndex
from drafter_service.rounds import Work, count_drafts
from tandem.config import DrafterConfig
from tandem.draft_tree import Draft
from tandem.speculation import Context, DraftRequest, DraftShape, Round


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

        ProtocolError for a round that breaks the protocol; the stream must end then.
        """
        started = time.perf_counter()
        work = Work.of(rounds, self._store, self._vocab_size, self._take)
        ready = work.ready(self._metrics)
        drafts = self._draft(ready) if ready else []
        return work.answer([r for r, _ in ready], drafts, time.perf_counter() - started, self._metrics)

    def _take(self, context: Context) -> Gap | None:
        if len(context.token_ids) != context.count:
            raise ProtocolError(
                f"contexts.token_ids: sequence {context.sequence_id} has {len(context.token_ids)}, "
                f"must be count, {context.count}"
            )
        index = self._store.extend(context.sequence_id, context.epoch, context.start_position, context.count)
        if isinstance(index, Gap):
            return index
        if index is not None:
            # Positions may come again; a sequence's tokens never change within an epoch.
            new = context.token_ids[len(index) - context.start_position :]
            index.extend(new)
            self._metrics.context_positions.inc(len(new))
        return None

    def _draft(self, ready: list[tuple[DraftRequest, NgramIndex]]) -> list[Draft]:
        started = time.perf_counter()
        drafts = [self._draft_one(index, request) for request, index in ready]
        count_drafts(drafts, time.perf_counter() - started, self._metrics)
        return drafts

    def _draft_one(self, index: NgramIndex, request: DraftRequest) -> Draft:
        nodes = request.max_nodes
        if request.shape is DraftShape.BLOCK:
            nodes = min(nodes, self._section.ngram_block_size - 1)
        return index.draft(request.anchor, nodes, request.shape)
