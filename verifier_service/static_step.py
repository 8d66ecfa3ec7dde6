"""TARGET_VERIFY in fixed shapes: a step's rows in the buffers of a bucket, run or replayed as a whole.

Inside are the forward, the taps' projection into the feature pool, the logits of the rows that choose, the largest of
each, the walk along drafts, and the moves of what it accepted, in KV and features alike. Around it are one copy of
integers to the device and one back. Plain tokens, chains, trees and prompt chunks differ in the integers only. Rows
behind the last one see nothing and write to the padding block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.graphs import BucketState, CapturedSteps, Driver, Fallback, Step
from tandem.kernels.step_tables import TableShape, length_of, pieces, words_of
from tandem.kernels.walk import walk_rows
from tandem.layers.argmax import argmax_rows
from verifier_service.buckets import Bucket, BucketLimits, buckets_of, smallest_for
from verifier_service.features import FeaturePool
from verifier_service.kv_cache import PADDING_BLOCK
from verifier_service.models.target_model import TargetModel
from verifier_service.step import SegmentRows
from verifier_service.step_executor import StepExecutor
from verifier_service.step_inputs import InputShape, StepInputs


@dataclass(frozen=True)
class StaticPlan:
    """How a rank runs steps of fixed shape."""

    limits: BucketLimits
    driver: Driver
    eager_fallback: bool
    together: bool
    """Whether there are other ranks."""


@dataclass(frozen=True)
class StaticResult:
    """What a step says, on the CPU."""

    bucket: Bucket
    chosen: list[int]
    """Of each row that chooses, in order, the token of the largest logit."""
    accepted: list[list[int]]
    """Per sequence, where its draft was walked, the rows it came by, as indices among those that choose: the root, then
    accepted nodes."""
    logits: torch.Tensor
    """[choosing, vocab], on the device, until the next step."""
    routing: torch.Tensor | None
    """[mixtures, rows, experts per token] int32, of real rows; None for a dense target."""
    seconds: float
    """From the step's integers being there to its results being here."""
    replayed: bool
    fallback: Fallback | None


@dataclass(frozen=True)
class _Outputs:
    """Results of a bucket: int32, views of one buffer."""

    chosen: torch.Tensor
    """[choosing]"""
    accepted: torch.Tensor
    """[sequences, 1 + nodes]: as walk_rows has them."""
    counts: torch.Tensor
    """[sequences]"""
    routing: torch.Tensor
    """[mixtures, rows, experts per token]"""


class StaticStep:
    """The steps of all buckets, over one set of buffers."""

    def __init__(
        self,
        executor: StepExecutor,
        model: TargetModel,
        plan: StaticPlan,
        feature_pool: FeaturePool | None = None,
        decides: bool = True,
    ):
        """feature_pool: where features go. decides: rank 0 does, the others compute their part only."""
        self._executor = executor
        self._model = model
        self._limits = plan.limits
        self._feature_pool = feature_pool if feature_pool and feature_pool.features else None
        self._decides = decides
        self._device = device = executor.kv.device
        self._buckets = buckets_of(plan.limits, executor.min_rows)
        self._ascending = self._buckets[::-1]
        self._blocks = -(-plan.limits.context // executor.block_tokens)
        on_gpu = device.type == "cuda"
        inputs = max(self._input_shape(b).size for b in self._buckets)
        outputs = max(length_of(self._output_parts(b)) for b in self._buckets)
        self._inputs_host, self._outputs_host = (
            torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu) for size in (inputs, outputs)
        )
        # On the CPU there is nothing to copy: both sides are one.
        self._inputs = torch.zeros_like(self._inputs_host, device=device) if on_gpu else self._inputs_host
        self._outputs = torch.zeros_like(self._outputs_host, device=device) if on_gpu else self._outputs_host
        choosing = max(b.choosing for b in self._buckets) if decides else 0
        self._logits = torch.zeros(choosing, model.vocab_size, dtype=model.dtype, device=device)
        self._on_host = {
            b: (StepInputs.over(self._inputs_host, self._input_shape(b)), self._outputs_of(self._outputs_host, b))
            for b in self._buckets
        }
        self._copied = torch.cuda.Event() if on_gpu else None
        self._steps: CapturedSteps[Bucket] = CapturedSteps(plan.driver, plan.eager_fallback, plan.together)

    @property
    def row_capacities(self) -> tuple[int, ...]:
        """Rows that buckets hold, ascending."""
        return tuple(sorted({bucket.rows for bucket in self._buckets}))

    def states(self) -> list[BucketState[Bucket]]:
        """Of all buckets, largest first; safe from any thread."""
        return list(self._steps)

    def capture(self) -> None:
        """Capture all buckets. With several ranks all must do so at the same time."""
        self._steps.capture((bucket, self._prepared(bucket)) for bucket in self._buckets)

    def bucket_for(self, segments: Sequence[SegmentRows], choosing: int) -> Bucket | None:
        """The smallest that holds the step; None if none does. All ranks come to the same."""
        room = self._blocks * self._executor.block_tokens
        for segment in segments:
            if segment.start + segment.rows > room:
                return None
            if segment.parents and words_of(segment) > self._limits.words:
                return None
        return smallest_for(self._ascending, sum(s.rows for s in segments), len(segments), choosing)

    def run(
        self, bucket: Bucket, segments: Sequence[SegmentRows], logit_rows: Sequence[int], greedy: Sequence[bool]
    ) -> StaticResult:
        """Run a step in its bucket.

        logit_rows: the rows that choose. greedy: per segment, whether it chooses along its largest logits: the moves of
        what it accepts are made then. Features of all rows are in the pool afterwards.
        """
        inputs, outputs = self._on_host[bucket]
        if self._copied:
            self._copied.synchronize()
        inputs.write(segments, self._executor.block_tokens, logit_rows, greedy)
        if self._copied:
            size = self._input_shape(bucket).size
            self._inputs[:size].copy_(self._inputs_host[:size], non_blocking=True)
            self._copied.record()
        ran = self._steps.run(bucket, lambda: self._read(bucket, outputs))
        rows = sum(segment.rows for segment in segments)
        sequences = len(segments) if self._decides else 0
        paths, counts = outputs.accepted[:sequences].tolist(), outputs.counts.tolist()
        return StaticResult(
            bucket=bucket,
            chosen=outputs.chosen[: len(logit_rows)].tolist(),
            accepted=[path[:count] for path, count in zip(paths, counts, strict=False)],
            logits=self._logits,
            routing=outputs.routing[:, :rows] if outputs.routing.shape[0] else None,
            seconds=ran.seconds,
            replayed=ran.replayed,
            fallback=ran.fallback,
        )

    def _read(self, bucket: Bucket, outputs: _Outputs) -> None:
        """Wait for the results."""
        if self._copied and self._decides:
            size = length_of(self._output_parts(bucket))
            self._outputs_host[:size].copy_(self._outputs[:size], non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()

    def _prepared(self, bucket: Bucket) -> Step:
        """The step of a bucket, whose inputs now describe padding only."""
        self._on_host[bucket][0].write((), self._executor.block_tokens, (), ())
        if self._copied:
            self._inputs.copy_(self._inputs_host)
        inputs = StepInputs.over(self._inputs, self._input_shape(bucket))
        outputs = self._outputs_of(self._outputs, bucket)
        return lambda: self._compute(inputs, outputs)

    def _compute(self, inputs: StepInputs, outputs: _Outputs) -> None:
        """All of a step that runs on the device."""
        batch = self._executor.table_batch(inputs)
        hidden = self._executor.run(batch, self._feature_pool.features if self._feature_pool else None)
        if not self._decides:
            if self._model.head_is_split:
                self._model.logits(hidden.index_select(0, inputs.choosing))
            return
        logits = self._model.logits(hidden.index_select(0, inputs.choosing))
        self._logits[: len(logits)].copy_(logits)
        chosen = argmax_rows(logits)
        token_ids = batch.token_ids.index_select(0, inputs.choosing)
        accepted, counts = walk_rows(chosen, token_ids, inputs.parents, inputs.roots, self._limits.nodes)
        self._move_accepted(batch.slots.index_select(0, inputs.choosing), inputs.roots, accepted)
        outputs.chosen.copy_(chosen)
        outputs.accepted.copy_(accepted)
        outputs.counts.copy_(counts)
        if len(outputs.routing):
            outputs.routing.copy_(torch.stack(self._model.routing))

    def _move_accepted(self, slots: torch.Tensor, roots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Bring accepted rows to the slots behind their roots. slots: of the rows that choose."""
        nodes = accepted.shape[1] - 1
        if not nodes:
            return
        rows = accepted[:, 1:]
        front = roots[:, None] + torch.arange(1, nodes + 1, dtype=torch.int32, device=self._device)
        nowhere = PADDING_BLOCK * self._executor.block_tokens
        sources, targets = (
            slots.index_select(0, at.clamp(0, len(slots) - 1).flatten()).view(at.shape).masked_fill(rows < 0, nowhere)
            for at in (rows, front)
        )
        self._executor.move_slots(sources.flatten(), targets.flatten())
        if self._feature_pool:
            self._feature_pool.move(sources.flatten(), targets.flatten())

    def _input_shape(self, bucket: Bucket) -> InputShape:
        tile = min(self._executor.rows_per_tile, bucket.rows)
        tables = TableShape(bucket.rows, bucket.sequences, self._blocks, self._limits.words, tile)
        return InputShape(tables, bucket.choosing)

    def _output_parts(self, bucket: Bucket) -> tuple[tuple[int, ...], ...]:
        mixtures, per_token = self._model.routes
        decided = bucket.choosing if self._decides else 0
        return (
            (decided,),
            (bucket.sequences, 1 + self._limits.nodes),
            (bucket.sequences,),
            (mixtures if self._decides else 0, bucket.rows, per_token),
        )

    def _outputs_of(self, arena: torch.Tensor, bucket: Bucket) -> _Outputs:
        return _Outputs(*pieces(arena, self._output_parts(bucket)))
