"""Asking drafters for drafts and taking their answers. Pure Python: knows no tensors and no RPC."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tandem.speculation import Context, DraftRequest, DraftShape, DraftSource, Round, SequenceDraft
from verifier_service.drafters import FEATURE_CHUNK_BYTES, Drafter, DrafterPool
from verifier_service.kv_cache import KvCache
from verifier_service.metrics import VerifierMetrics
from verifier_service.sequence import PendingDraft, Sequence

logger = logging.getLogger(__name__)

_MAX_PAUSE_SECONDS = 30.0

_PRIMED_POSITIONS = 32
"""A draft asked for along with at most so many positions of context takes as long as one with none."""
_TOKEN_BYTES = 5
"""Of a token id on the wire at most."""

ReadFeatures = Callable[[list[int], int, int], bytes]
"""(block table, first position, count) -> bytes of the features."""


@dataclass(frozen=True)
class DraftLimits:
    """What the draft model, or else the n-gram drafter, allows."""

    block_nodes: int
    """Nodes of a block at most: block size less one."""
    feature_bytes: int
    """Bytes of one feature; 0 without a draft model."""


@dataclass(frozen=True)
class DraftOrder:
    """What to ask a sequence's drafter for."""

    nodes: int
    """At most; 0 only sends it the sequence's context."""
    shape: DraftShape = DraftShape.BLOCK


@dataclass(frozen=True)
class DraftReply:
    """Drafts of one forward pass of a drafter."""

    drafts: list[SequenceDraft]
    compute_us: int


class Drafting:
    """Keeps drafters supplied with contexts and sequences with drafts. Without limits it does nothing."""

    def __init__(self, limits: DraftLimits | None, kv: KvCache, read_features: ReadFeatures, metrics: VerifierMetrics):
        self.pool = DrafterPool()
        self._limits = limits
        self._kv = kv
        self._read_features = read_features
        self._metrics = metrics

    @property
    def block_nodes(self) -> int:
        """Nodes of a block at most; 0 without speculation."""
        return self._limits.block_nodes if self._limits else 0

    def missing(self, sequence: Sequence) -> int:
        """Positions its drafter would have to be sent before it can draft for the sequence."""
        drafter = self.pool.holder(sequence.id)
        return sequence.committed - (drafter.sent[sequence.id] if drafter else 0)

    def ask(self, sequences: Iterable[Sequence], orders: Mapping[Sequence, DraftOrder]) -> None:
        """Send each ordered sequence's new context to its drafter, and ask for a draft where the next step can use one.

        A sequence without an order is sent nothing, unless a draft of it is awaited already: then it is asked for anew.
        Also tells drafters which sequences ended. Sequences must be running.
        """
        contexts: dict[Drafter, list[Context]] = {}
        requests: dict[Drafter, list[DraftRequest]] = {}
        for sequence in sequences:
            pending = sequence.pending
            order = DraftOrder(pending.max_nodes, pending.shape) if pending else orders.get(sequence)
            drafter = self.pool.of(sequence.id) if self._limits and order else None
            if drafter is None or order is None:
                continue
            primed = self.missing(sequence) <= _PRIMED_POSITIONS
            contexts.setdefault(drafter, []).extend(self._contexts(drafter, sequence))
            request = self._request(drafter, sequence, order, primed)
            if request:
                requests.setdefault(drafter, []).append(request)
        for drafter in self.pool.drafters:
            self._send(drafter, contexts.get(drafter, []), requests.get(drafter, []))

    def attach(self, drafter: Drafter) -> None:
        self.pool.attach(drafter)

    def detach(self, drafter: Drafter, sequences: dict[int, Sequence]) -> None:
        """Forget a drafter. The sequences it drafted for stop waiting for it."""
        for sequence_id in self.pool.detach(drafter):
            pending, sequences[sequence_id].pending = sequences[sequence_id].pending, None
            if pending and pending.span and pending.draft is None:
                pending.span.end("lost")

    def deliver(self, drafter: Drafter, reply: DraftReply, sequences: dict[int, Sequence]) -> None:
        """Attach drafts to their sequences. Those with a stale epoch or base position are dropped.

        A draft without tokens says that there is nothing to propose: the sequence waits no longer, and steps plainly.
        """
        now = time.perf_counter()
        drafter.silent_until, drafter.pause_seconds = 0.0, 1.0
        self._metrics.draft_seconds.observe(reply.compute_us / 1e6)
        for item in reply.drafts:
            sequence = sequences.get(item.sequence_id)
            pending = sequence.pending if sequence else None
            wanted = (sequence.epoch, pending.base_position) if sequence and pending else None
            if wanted != (item.epoch, item.base_position) or self.pool.holder(item.sequence_id) is not drafter:
                self._metrics.discarded_drafts.labels("stale").inc()
                continue
            assert pending
            pending.draft = item.draft.truncated(pending.max_nodes)
            pending.compute_us = reply.compute_us
            self._metrics.round_trip_seconds.observe(now - pending.requested_at)
            if pending.span:
                pending.span.end("drafted", len(pending.draft), reply.compute_us)

    def gap(
        self, drafter: Drafter, sequence_id: int, epoch: int, held: int, sequences: dict[int, Sequence]
    ) -> Sequence | None:
        """A drafter lacks context from `held` on. Returns the sequence if it is to be asked for again."""
        sequence = sequences.get(sequence_id)
        if sequence is None or sequence.epoch != epoch or self.pool.holder(sequence_id) is not drafter:
            return None
        logger.warning("drafter %s lacks the context of sequence %d from %d on", drafter.name, sequence_id, held)
        drafter.sent[sequence_id] = min(held, drafter.sent[sequence_id])
        # The request stays pending with its deadline: a drafter that never catches up costs one timeout.
        return sequence

    def gave_up(self, sequence: Sequence) -> None:
        """A draft did not come in time. Nothing is asked of its drafter until it answers, or a pause is over."""
        self._metrics.discarded_drafts.labels("late").inc()
        drafter = self.pool.holder(sequence.id)
        now = time.perf_counter()
        if drafter and now >= drafter.silent_until:
            logger.warning("drafter %s is late; plain decoding for up to %gs", drafter.name, drafter.pause_seconds)
            drafter.silent_until = now + drafter.pause_seconds
            drafter.pause_seconds = min(2 * drafter.pause_seconds, _MAX_PAUSE_SECONDS)

    def restart(self, sequence: Sequence) -> None:
        """The sequence starts over: its context will be sent anew."""
        self.pool.restart(sequence.id)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended."""
        self.pool.release(sequence.id)

    def _contexts(self, drafter: Drafter, sequence: Sequence) -> list[Context]:
        assert self._limits
        contexts = []
        by_tokens = drafter.source is DraftSource.NGRAM
        chunk = max(1, FEATURE_CHUNK_BYTES // (_TOKEN_BYTES if by_tokens else self._limits.feature_bytes))
        start = drafter.sent[sequence.id]
        blocks = self._kv.table(sequence.id)
        while start < sequence.committed:
            count = min(chunk, sequence.committed - start)
            features = b"" if by_tokens else self._read_features(blocks, start, count)
            tokens = tuple(sequence.tokens[start : start + count]) if by_tokens else ()
            contexts.append(Context(sequence.id, sequence.epoch, start, count, features, tokens))
            start += count
        drafter.sent[sequence.id] = sequence.committed
        return contexts

    def _request(self, drafter: Drafter, sequence: Sequence, order: DraftOrder, primed: bool) -> DraftRequest | None:
        assert self._limits
        max_nodes = min(order.nodes, sequence.remaining - 1)
        if order.shape is DraftShape.BLOCK:
            max_nodes = min(max_nodes, self._limits.block_nodes)
        now = time.perf_counter()
        if sequence.uncommitted != 1 or max_nodes < 1 or now < drafter.silent_until:
            return None
        if sequence.pending is None:
            spans = sequence.request.spans
            span = spans.asked() if spans else None
            sequence.pending = PendingDraft(sequence.committed, max_nodes, order.shape, now, primed, span=span)
        parent = sequence.pending.span.traceparent if sequence.pending.span else ""
        anchor = sequence.tokens[-1]
        return DraftRequest(sequence.id, sequence.epoch, sequence.committed, anchor, max_nodes, order.shape, parent)

    def _send(self, drafter: Drafter, contexts: list[Context], requests: list[DraftRequest]) -> None:
        released, drafter.released = drafter.released, []
        batch: list[Context] = []
        size = 0
        for context in contexts:
            added = len(context.features) + _TOKEN_BYTES * len(context.token_ids)
            if batch and size + added > FEATURE_CHUNK_BYTES:
                drafter.send(Round(batch, [], []))
                batch, size = [], 0
            batch.append(context)
            size += added
        if batch or requests or released:
            drafter.send(Round(batch, requests, released))
        self._metrics.feature_bytes.inc(sum(len(c.features) for c in contexts))
