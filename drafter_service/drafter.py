"""From rounds to drafts: keeps contexts, batches requests, runs the draft model."""

import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Generic, Protocol

import torch

from drafter_service.context_store import ContextStore
from drafter_service.draft_model import KV, BlockRequest, ContextRows
from drafter_service.messages import Answer, Gap, ProtocolError
from drafter_service.metrics import DrafterMetrics
from drafter_service.rounds import Work, count_drafts
from tandem.checkpoints.draft_config import DraftConfig
from tandem.draft_tree import Draft
from tandem.speculation import Context, DraftRequest, Round

# Features are read in place from received messages, which are never written to.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

_MAX_TREE_NODES = 1024
"""However many a verifier asks for: a tree of so many takes 1 to 2 ms to build, in which no sequence is served."""


class ServedModel(Protocol[KV]):
    """See DraftModel and PagedDraftModel."""

    config: DraftConfig

    def new_context(self) -> KV: ...

    def has_room(self, positions: int) -> bool: ...

    def reserve(self, kv: KV, positions: int) -> bool: ...

    def write_context(self, contexts: Sequence[ContextRows[KV]]) -> None: ...

    def draft(self, requests: Sequence[BlockRequest[KV]]) -> list[Draft]: ...


class Drafter(Generic[KV]):
    """Drafts for one verifier's stream. Blocking; not thread-safe."""

    def __init__(self, model: ServedModel[KV], feature_dtype: str, metrics: DrafterMetrics):
        """feature_dtype: "bfloat16" or "float32", as the verifier announced."""
        self._model = model
        self._feature_dtype: torch.dtype = getattr(torch, feature_dtype)
        self._store: ContextStore[KV] = ContextStore(model.new_context)
        self._metrics = metrics

    def work(self, rounds: Sequence[Round]) -> Answer:
        """All rounds together: one product over all their features, one forward over all their requests.

        ProtocolError for a round that breaks the protocol; the stream must end then.
        """
        started = time.perf_counter()
        rows: list[ContextRows[KV]] = []
        work = Work.of(rounds, self._store, self._model.config.vocab_size, partial(self._take, rows))
        if rows:
            self._model.write_context(rows)
            self._metrics.context_seconds.observe(time.perf_counter() - started)
        self._metrics.context_positions.inc(sum(len(r.features) for r in rows))
        ready, roomless = self._with_room(work)
        drafts = self._draft(ready) if ready else []
        drafts += [Draft([], [], [])] * len(roomless)
        self._metrics.drafts.inc(len(roomless))
        self._metrics.empty_drafts.inc(len(roomless))
        requests = [request for request, _ in ready] + roomless
        return work.answer(requests, drafts, time.perf_counter() - started, self._metrics)

    def _with_room(self, work: Work[KV]) -> tuple[list[tuple[DraftRequest, KV]], list[DraftRequest]]:
        """The requests to draft, and those of dropped contexts, for which there is no room still: nothing is proposed
        for them. Where there is room again the whole context is asked for."""
        ready, roomless = [], []
        for request, kv in work.ready(self._metrics):
            if self._model.reserve(kv, request.base_position):
                ready.append((request, kv))
            elif self._model.has_room(request.base_position):
                self._store.release(request.sequence_id)
                work.gaps[request.sequence_id] = Gap(request.sequence_id, request.epoch, held_positions=0)
            else:
                roomless.append(request)
        return ready, roomless

    def _take(self, rows: list[ContextRows[KV]], context: Context) -> Gap | None:
        width = self._model.config.hidden_size
        wanted = context.count * width * self._feature_dtype.itemsize
        if len(context.features) != wanted:
            raise ProtocolError(
                f"contexts.features: sequence {context.sequence_id} has {len(context.features)} bytes, "
                f"{context.count} features of {width} {str(self._feature_dtype).removeprefix('torch.')} are {wanted}"
            )
        kv = self._store.extend(context.sequence_id, context.epoch, context.start_position, context.count)
        if isinstance(kv, Gap):
            return kv
        end = context.start_position + context.count
        if kv is not None and context.count and self._model.reserve(kv, end):
            features = torch.frombuffer(context.features, dtype=self._feature_dtype).view(context.count, width)
            rows.append(ContextRows(kv, context.start_position, features))
        return None

    def _draft(self, ready: list[tuple[DraftRequest, KV]]) -> list[Draft]:
        blocks = [
            BlockRequest(kv, r.base_position, r.anchor, min(r.max_nodes, _MAX_TREE_NODES), r.shape) for r, kv in ready
        ]
        started = time.perf_counter()
        drafts = self._model.draft(blocks)
        count_drafts(drafts, time.perf_counter() - started, self._metrics)
        return drafts
