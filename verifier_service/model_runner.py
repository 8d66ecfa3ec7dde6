"""What rank 0 does in a step: the rows, sampling and walk, KV and features of what was committed.

Rows of all segments lie flat: plain tokens, chains, trees and prompts mix. A tree's rows are written to consecutive KV
slots, whatever their positions; those the walk accepted move to the front afterwards.
"""

import time
from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

import torch

from tandem.draft_tree import walk
from tandem.errors import Unavailable
from tandem.layers.argmax import argmax_rows
from tandem.sampling import SamplingParams
from verifier_service.buckets import Bucket
from verifier_service.features import FeaturePool, FeatureProjection
from verifier_service.kv_cache import PADDING_BLOCK
from verifier_service.load import GraphBucket
from verifier_service.models.target_model import Features, TargetModel
from verifier_service.sampler import log_prob, sample
from verifier_service.sequence import Sequence, SequenceRequest
from verifier_service.static_step import StaticPlan, StaticResult, StaticStep
from verifier_service.step import RankStep, Segment, SegmentRows, StepResult, Verdict
from verifier_service.step_executor import Computed, StepExecutor

NO_BUCKET = "no_bucket"
"""Why a step ran eagerly: it is larger than all buckets."""
_Result = TypeVar("_Result")


class ModelRunner:
    """The target with its KV and feature pools."""

    def __init__(
        self,
        model: TargetModel,
        features: FeatureProjection | None,
        kv_blocks: int,
        block_tokens: int,
        device: torch.device,
        tell_ranks: Callable[[RankStep], None] | None = None,
        static: StaticPlan | None = None,
    ):
        """tell_ranks: sends each step to the other ranks before it is run here. static: run steps in fixed shapes."""
        self._block_tokens = block_tokens
        self._device = device
        self._executor = StepExecutor(model, kv_blocks, block_tokens, device)
        self._feature_pool = FeaturePool(kv_blocks * block_tokens, features, model.dtype, device)
        self._tell_ranks = tell_ranks
        self.static = StaticStep(self._executor, model, static, self._feature_pool) if static else None
        """None: steps run in the shapes they happen to have."""
        self._moves: list[tuple[int, int]] = []
        """Of the last step: made here already, still to be made by the other ranks."""

    @torch.inference_mode()
    def run(self, segments: list[Segment]) -> StepResult:
        """One target forward over all rows of all segments, and what it decides."""
        rows = [segment.for_ranks() for segment in segments]
        logit_rows = _logit_rows(segments)
        bucket = self.static.bucket_for(rows, len(logit_rows)) if self.static else None
        if bucket:
            return self._run_static(bucket, segments, rows, logit_rows)
        started = time.perf_counter()
        features = self._feature_pool.features if any(s.sequence.request.speculates for s in segments) else None
        computed, logits = self._together(rows, logit_rows, lambda: self._compute(rows, logit_rows, features))
        forward_seconds = time.perf_counter() - started
        verdicts = [
            _decide(s, logits[first : first + s.nodes + 1]) if s.samples else _prefilled(s)
            for s, first in zip(segments, _first_logits(segments), strict=True)
        ]
        self._moves = _moves(rows, verdicts, self._block_tokens)
        self._move(self._moves)
        routing = torch.stack(computed.routing).cpu().numpy() if computed.routing else None
        fallback = NO_BUCKET if self.static else None
        return StepResult(verdicts, len(computed.hidden), forward_seconds, routing, fallback=fallback)

    def _run_static(
        self, bucket: Bucket, segments: list[Segment], rows: list[SegmentRows], logit_rows: list[int]
    ) -> StepResult:
        """The same in the bucket's buffers, where greedy sequences are decided and moved inside the step."""
        assert self.static
        static = self.static
        greedy = [s.samples and s.sequence.request.sampling.greedy for s in segments]
        ran = self._together(rows, logit_rows, lambda: static.run(bucket, rows, logit_rows, greedy))
        verdicts = []
        for i, (segment, first) in enumerate(zip(segments, _first_logits(segments), strict=True)):
            if greedy[i]:
                verdicts.append(_walked(segment, i, first, ran))
            elif segment.samples:
                verdicts.append(_decide(segment, ran.logits[first : first + segment.nodes + 1]))
            else:
                verdicts.append(_prefilled(segment))
        self._moves = _moves(rows, verdicts, self._block_tokens)
        sampled = [i for i in range(len(rows)) if not greedy[i]]
        self._move(_moves([rows[i] for i in sampled], [verdicts[i] for i in sampled], self._block_tokens))
        return StepResult(
            verdicts,
            bucket.rows,
            ran.seconds,
            ran.routing.numpy() if ran.routing is not None else None,
            replay_seconds=ran.seconds if ran.replayed else None,
            fallback=ran.fallback.value if ran.fallback else None,
        )

    @torch.inference_mode()
    def read_features(self, blocks: list[int], start: int, count: int) -> bytes:
        """Features of committed positions [start, start + count) of a sequence with this block table."""
        return self._feature_pool.read(self._executor.slots(blocks, start, count).to(self._device))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the steps of fixed shape, if they are run; with several ranks all at the same time."""
        if self.static:
            self.static.capture()

    def buckets(self) -> list[GraphBucket]:
        """The capacities of steps of fixed shape; safe from any thread."""
        states = self.static.states() if self.static else []
        return [GraphBucket(s.bucket.rows, s.bucket.sequences, s.captured, s.why, s.runs, s.seconds) for s in states]

    def warm_up(self, max_rows: int) -> None:
        """Run steps of 1 and of max_rows rows, so that the first request does not pay for first calls."""
        count = min(max_rows, self._block_tokens)
        for rows in (1, count, 1, count):
            request = SequenceRequest("warm-up", [0] * rows, rows, SamplingParams(temperature=0.0), 1)
            sequence = Sequence.from_request(0, request)
            self.run([Segment(sequence, 0, sequence.tokens, None, True, [PADDING_BLOCK])])

    def _compute(
        self, rows: list[SegmentRows], logit_rows: list[int], features: Features | None
    ) -> tuple[Computed, torch.Tensor]:
        computed = self._executor.forward(rows, features)
        return computed, self._executor.logits(computed.hidden, logit_rows)

    def _move(self, moves: list[tuple[int, int]]) -> None:
        """Copy keys, values and features between slots, (from, to)."""
        if moves:
            sources, targets = torch.tensor(moves).to(self._device).unbind(1)
            self._executor.move_slots(sources, targets)
            if self._feature_pool.features:
                self._feature_pool.move(sources, targets)

    def _together(self, rows: list[SegmentRows], logit_rows: list[int], compute: Callable[[], _Result]) -> _Result:
        """What compute() says of these rows, computed by all ranks together. Unavailable if that fails where there are
        several: they wait in the middle of a step then, and nothing brings them together again."""
        if self._tell_ranks:
            moves, self._moves = self._moves, []
            self._tell_ranks(RankStep(moves, rows, logit_rows))
        try:
            return compute()
        except Exception as error:
            if self._tell_ranks is None or isinstance(error, Unavailable):
                raise
            raise Unavailable(f"verifier: a step failed, and with it the ranks: {error}") from error


def _logit_rows(segments: list[Segment]) -> list[int]:
    """The rows that choose a token: each sampling segment's last token and its nodes, in order."""
    chosen: list[int] = []
    first_row = 0
    for segment in segments:
        if segment.samples:
            chosen += range(first_row + len(segment.token_ids) - 1, first_row + segment.rows)
        first_row += segment.rows
    return chosen


def _first_logits(segments: list[Segment]) -> list[int]:
    """Of each segment how many rows before it choose a token."""
    counts = [segment.nodes + 1 if segment.samples else 0 for segment in segments]
    return list(accumulate(counts, initial=0))[:-1]


def _moves(rows: list[SegmentRows], verdicts: list[Verdict], block_tokens: int) -> list[tuple[int, int]]:
    """(from, to) KV slots that bring the accepted rows of each segment to its first slots."""
    return [
        (segment.slot(row, block_tokens), segment.slot(to, block_tokens))
        for segment, verdict in zip(rows, verdicts, strict=True)
        for to, row in enumerate(verdict.accepted_rows)
        if row != to
    ]


def _prefilled(segment: Segment) -> Verdict:
    """Of a segment that does not sample."""
    return Verdict(list(range(segment.rows)), [], [])


def _walked(segment: Segment, number: int, first: int, ran: StaticResult) -> Verdict:
    """Of segment `number` of a static step, whose logits begin at `first`: its draft is walked already."""
    path = ran.accepted[number]
    chosen = [ran.chosen[i] for i in path]
    log_probs = []
    if segment.sequence.request.log_probs:
        log_probs = [log_prob(ran.logits[i], token) for i, token in zip(path, chosen, strict=True)]
    root = len(segment.token_ids) - 1
    return Verdict([*range(root), *(root + i - first for i in path)], chosen, log_probs)


def _decide(segment: Segment, logits: torch.Tensor) -> Verdict:
    """Walk the segment's draft along the target's choices. logits: [1 + nodes, vocab], the root's row first."""
    request = segment.sequence.request
    tokens = len(segment.token_ids)
    next_position = segment.start + tokens
    # On a GPU all rows at once, which is one wait for it; on a CPU only those that the walk comes by.
    greedy = argmax_rows(logits).tolist() if request.sampling.greedy and logits.is_cuda else None

    def choose(index: int, depth: int) -> int:
        return int(greedy[index]) if greedy else sample(logits[index], request.sampling, next_position + depth)

    accepted, chosen = walk(segment.draft, choose)
    log_probs = []
    if request.log_probs:
        log_probs = [log_prob(logits[i], token) for i, token in zip([0, *accepted], chosen, strict=True)]
    return Verdict([*range(tokens), *(tokens + i - 1 for i in accepted)], chosen, log_probs)
