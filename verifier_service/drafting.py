"""Asking drafters for drafts and taking their answers. Pure Python: knows no tensors and no RPC."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tandem.speculation import Context, DraftRequest, Round, SequenceDraft
from verifier_service.drafters import FEATURE_CHUNK_BYTES, Drafter, DrafterPool
from verifier_service.kv_cache import KvCache
from verifier_service.metrics import VerifierMetrics
from verifier_service.sequence import PendingDraft, Sequence

logger = logging.getLogger(__name__)

_MAX_PAUSE_SECONDS = 30.0

ReadFeatures = Callable[[list[int], int, int], bytes]
"""(block table, first position, count) -> bytes of the features."""


@dataclass(frozen=True)
class DraftShape:
    """What the draft model allows."""

    max_nodes: int
    """Nodes of a draft at most: block size less one."""
    feature_bytes: int
    """Bytes of one feature."""


@dataclass(frozen=True)
class DraftReply:
    """Drafts of one forward pass of a drafter."""

    drafts: list[SequenceDraft]
    compute_us: int


class Drafting:
    """Keeps drafters supplied with features and sequences with drafts. Without a draft shape it does nothing."""

    def __init__(self, shape: DraftShape | None, kv: KvCache, read_features: ReadFeatures, metrics: VerifierMetrics):
        self.pool = DrafterPool()
        self._shape = shape
        self._kv = kv
        self._read_features = read_features
        self._metrics = metrics

    def ask(self, sequences: Iterable[Sequence]) -> None:
        """Send each sequence's new features to its drafter, and ask for a draft where the next step can use one.

        Also tells drafters which sequences ended. Sequences must be running.
        """
        contexts: dict[Drafter, list[Context]] = {}
        requests: dict[Drafter, list[DraftRequest]] = {}
        for sequence in sequences:
            drafter = self.pool.of(sequence.id) if self._shape and sequence.request.speculate else None
            if drafter is None:
                continue
            contexts.setdefault(drafter, []).extend(self._contexts(drafter, sequence))
            request = self._request(drafter, sequence)
            if request:
                requests.setdefault(drafter, []).append(request)
        for drafter in self.pool.drafters:
            self._send(drafter, contexts.get(drafter, []), requests.get(drafter, []))

    def attach(self, drafter: Drafter) -> None:
        self.pool.attach(drafter)

    def detach(self, drafter: Drafter, sequences: dict[int, Sequence]) -> list[Sequence]:
        """Forget a drafter. Returns the sequences it drafted for, which stop waiting for it."""
        orphans = [sequences[i] for i in self.pool.detach(drafter)]
        for sequence in orphans:
            sequence.pending = None
        return orphans

    def deliver(self, drafter: Drafter, reply: DraftReply, sequences: dict[int, Sequence]) -> None:
        """Attach drafts to their sequences. Those with a stale epoch or base position are dropped."""
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

    def gap(
        self, drafter: Drafter, sequence_id: int, epoch: int, held: int, sequences: dict[int, Sequence]
    ) -> list[Sequence]:
        """A drafter lacks features from `held` on. Returns the sequence if it is to be asked for again."""
        sequence = sequences.get(sequence_id)
        if sequence is None or sequence.epoch != epoch or self.pool.holder(sequence_id) is not drafter:
            return []
        logger.warning("drafter %s lacks features of sequence %d from %d on", drafter.name, sequence_id, held)
        drafter.sent[sequence_id] = min(held, drafter.sent[sequence_id])
        # The request stays pending with its deadline: a drafter that never catches up costs one timeout.
        return [sequence]

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
        """The sequence starts over: its features will be sent anew."""
        self.pool.restart(sequence.id)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended."""
        self.pool.release(sequence.id)

    def _contexts(self, drafter: Drafter, sequence: Sequence) -> list[Context]:
        assert self._shape
        contexts = []
        chunk = max(1, FEATURE_CHUNK_BYTES // self._shape.feature_bytes)
        start = drafter.sent[sequence.id]
        blocks = self._kv.table(sequence.id)
        while start < sequence.committed:
            count = min(chunk, sequence.committed - start)
            features = self._read_features(blocks, start, count)
            contexts.append(Context(sequence.id, sequence.epoch, start, count, features))
            start += count
        drafter.sent[sequence.id] = sequence.committed
        return contexts

    def _request(self, drafter: Drafter, sequence: Sequence) -> DraftRequest | None:
        assert self._shape
        max_nodes = min(self._shape.max_nodes, sequence.remaining - 1)
        now = time.perf_counter()
        if sequence.uncommitted != 1 or max_nodes < 1 or now < drafter.silent_until:
            return None
        if sequence.pending is None:
            sequence.pending = PendingDraft(sequence.committed, max_nodes, now)
        return DraftRequest(sequence.id, sequence.epoch, sequence.committed, sequence.tokens[-1], max_nodes)

    def _send(self, drafter: Drafter, contexts: list[Context], requests: list[DraftRequest]) -> None:
        released, drafter.released = drafter.released, []
        batch: list[Context] = []
        size = 0
        for context in contexts:
            if batch and size + len(context.features) > FEATURE_CHUNK_BYTES:
                drafter.send(Round(batch, [], []))
                batch, size = [], 0
            batch.append(context)
            size += len(context.features)
        if batch or requests or released:
            drafter.send(Round(batch, requests, released))
        self._metrics.feature_bytes.inc(sum(len(c.features) for c in contexts))
