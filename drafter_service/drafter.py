"""From rounds to drafts: keeps contexts, batches requests, runs the draft model."""

import time
import warnings
from collections.abc import Sequence

import torch

from drafter_service.context_kv import ContextKV
from drafter_service.context_store import ContextStore
from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.messages import Answer, Gap, ProtocolError
from drafter_service.metrics import DrafterMetrics
from tandem.speculation import Context, DraftRequest, Round, SequenceDraft

# Features are read in place from received messages, which are never written to.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

_MAX_TREE_NODES = 1024
"""However many a verifier asks for: a tree of so many takes 1 to 2 ms to build, in which no sequence is served."""


class Drafter:
    """Drafts for one verifier's stream. Blocking; not thread-safe."""

    def __init__(self, model: DraftModel, feature_dtype: str, metrics: DrafterMetrics):
        """feature_dtype: "bfloat16" or "float32", as the verifier announced."""
        self._model = model
        self._feature_dtype: torch.dtype = getattr(torch, feature_dtype)
        self._store: ContextStore[ContextKV] = ContextStore(model.new_context)
        self._metrics = metrics

    def work(self, rounds: Sequence[Round]) -> Answer:
        """All rounds together: one product over all their features, one forward over all their requests.

        Of several requests for one sequence only the last is served: the verifier asks again when it has moved on.
        ProtocolError for a round that breaks the protocol; the stream must end then.
        """
        started = time.perf_counter()
        rows: list[ContextRows] = []
        requests: dict[int, DraftRequest] = {}
        gaps: dict[int, Gap] = {}
        for round_ in rounds:
            for context in round_.contexts:
                self._take(context, rows, gaps)
            for request in round_.requests:
                self._check(request)
                requests[request.sequence_id] = request
            for sequence_id in round_.released_sequence_ids:
                self._store.release(sequence_id)
                requests.pop(sequence_id, None)
                gaps.pop(sequence_id, None)
        if rows:
            self._model.write_context(rows)
            self._metrics.context_seconds.observe(time.perf_counter() - started)
        drafts = self._draft(list(requests.values()), gaps)
        self._metrics.rounds.inc(len(rounds))
        self._metrics.context_positions.inc(sum(len(r.features) for r in rows))
        self._metrics.context_gaps.inc(len(gaps))
        self._metrics.sequences.set(len(self._store))
        return Answer(drafts, list(gaps.values()), int((time.perf_counter() - started) * 1e6))

    def _take(self, context: Context, rows: list[ContextRows], gaps: dict[int, Gap]) -> None:
        width = self._model.config.hidden_size
        wanted = context.count * width * self._feature_dtype.itemsize
        if len(context.features) != wanted:
            raise ProtocolError(
                f"contexts.features: sequence {context.sequence_id} has {len(context.features)} bytes, "
                f"{context.count} features of {width} {str(self._feature_dtype).removeprefix('torch.')} are {wanted}"
            )
        kv = self._store.extend(context.sequence_id, context.epoch, context.start_position, context.count)
        if isinstance(kv, Gap):
            gaps[context.sequence_id] = kv
        elif kv is not None and context.count:
            features = torch.frombuffer(context.features, dtype=self._feature_dtype).view(context.count, width)
            rows.append(ContextRows(kv, context.start_position, features))

    def _check(self, request: DraftRequest) -> None:
        if request.anchor >= self._model.config.vocab_size:
            raise ProtocolError(
                f"requests.anchor: must be below vocab_size {self._model.config.vocab_size}, is {request.anchor}"
            )
        if request.max_nodes < 1:
            raise ProtocolError(f"requests.max_nodes: must be at least 1, is {request.max_nodes}")

    def _draft(self, requests: list[DraftRequest], gaps: dict[int, Gap]) -> list[SequenceDraft]:
        """Drafts of the requests whose context is complete; the others' gaps are added to `gaps`."""
        blocks: list[tuple[DraftRequest, BlockRequest]] = []
        for request in requests:
            kv = self._store.behind(request.sequence_id, request.epoch, request.base_position)
            if kv is None:
                self._metrics.stale_requests.inc()
            elif isinstance(kv, Gap):
                gaps[request.sequence_id] = kv
            else:
                nodes = min(request.max_nodes, _MAX_TREE_NODES)
                block = BlockRequest(kv, request.base_position, request.anchor, nodes, request.shape)
                blocks.append((request, block))
        if not blocks:
            return []
        started = time.perf_counter()
        drafts = self._model.draft([block for _, block in blocks])
        self._metrics.forward_seconds.observe(time.perf_counter() - started)
        self._metrics.batch_size.observe(len(blocks))
        self._metrics.drafts.inc(len(blocks))
        self._metrics.draft_tokens.inc(sum(map(len, drafts)))
        return [
            SequenceDraft(r.sequence_id, r.epoch, r.base_position, draft)
            for (r, _), draft in zip(blocks, drafts, strict=True)
        ]
