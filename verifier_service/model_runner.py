"""What rank 0 does in a step: the rows, sampling and walk, KV and features of what was committed.

Rows of all segments lie flat: plain tokens, chains, trees and prompts mix. A tree's rows are written to consecutive KV
slots, whatever their positions; those the walk accepted move to the front afterwards.
"""

import time
from collections.abc import Callable

import torch

from tandem.draft_tree import walk
from tandem.errors import Unavailable
from tandem.layers.argmax import argmax_rows
from tandem.sampling import SamplingParams
from verifier_service.features import FeaturePool, FeatureProjection
from verifier_service.kv_cache import PADDING_BLOCK
from verifier_service.models.target_model import TargetModel
from verifier_service.sampler import log_prob, sample
from verifier_service.sequence import Sequence, SequenceRequest
from verifier_service.step import RankStep, Segment, SegmentRows, StepResult, Verdict
from verifier_service.step_executor import Computed, StepExecutor


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
    ):
        """tell_ranks: sends each step to the other ranks before it is run here."""
        self._tap_layers = features.config.target_layer_ids if features else ()
        self._block_tokens = block_tokens
        self._device = device
        self._executor = StepExecutor(model, kv_blocks, block_tokens, device)
        self._feature_pool = FeaturePool(kv_blocks * block_tokens, features, model.dtype, device)
        self._tell_ranks = tell_ranks
        self._moves: list[tuple[int, int]] = []
        """Of the last step: made here already, still to be made by the other ranks."""

    @torch.inference_mode()
    def run(self, segments: list[Segment]) -> StepResult:
        """One target forward over all rows of all segments, and what it decides."""
        started = time.perf_counter()
        rows = [segment.for_ranks() for segment in segments]
        logit_rows = _logit_rows(segments)
        tapped = bool(self._tap_layers) and any(s.sequence.request.speculates for s in segments)
        computed, logits = self._compute(rows, logit_rows, self._tap_layers if tapped else ())
        forward_seconds = time.perf_counter() - started

        verdicts = []
        first_logit = 0
        for segment in segments:
            if segment.samples:
                of_segment = logits[first_logit : first_logit + segment.nodes + 1]
                verdicts.append(_decide(segment, of_segment))
                first_logit += segment.nodes + 1
            else:
                verdicts.append(Verdict(list(range(segment.rows)), [], []))
        self._moves = _moves(rows, verdicts, self._block_tokens)
        self._executor.move(self._moves)
        if tapped:
            self._keep_features(segments, verdicts, computed.slots, computed.taps)
        routing = torch.stack(computed.routing).cpu().numpy() if computed.routing else None
        return StepResult(verdicts, len(computed.hidden), forward_seconds, routing)

    @torch.inference_mode()
    def read_features(self, blocks: list[int], start: int, count: int) -> bytes:
        """Features of committed positions [start, start + count) of a sequence with this block table."""
        return self._feature_pool.read(self._executor.slots(blocks, start, count).to(self._device))

    def warm_up(self, max_rows: int) -> None:
        """Run steps of 1 and of max_rows rows, so that the first request does not pay for first calls."""
        count = min(max_rows, self._block_tokens)
        for rows in (1, count, 1, count):
            request = SequenceRequest("warm-up", [0] * rows, rows, SamplingParams(temperature=0.0), 1)
            sequence = Sequence.from_request(0, request)
            self.run([Segment(sequence, 0, sequence.tokens, None, True, [PADDING_BLOCK])])

    def _compute(
        self, rows: list[SegmentRows], logit_rows: list[int], tap_layers: tuple[int, ...]
    ) -> tuple[Computed, torch.Tensor]:
        """The rows and their logits, by all ranks together. Unavailable if that fails where there are several: they
        wait in the middle of a step then, and nothing brings them together again."""
        if self._tell_ranks:
            moves, self._moves = self._moves, []
            self._tell_ranks(RankStep(moves, rows, logit_rows))
        try:
            computed = self._executor.forward(rows, tap_layers)
            return computed, self._executor.logits(computed.hidden, logit_rows)
        except Exception as error:
            if self._tell_ranks is None or isinstance(error, Unavailable):
                raise
            raise Unavailable(f"verifier: a step failed, and with it the ranks: {error}") from error

    def _keep_features(
        self, segments: list[Segment], verdicts: list[Verdict], slots: torch.Tensor, taps: list[torch.Tensor]
    ) -> None:
        rows: list[int] = []
        kept: list[int] = []
        first_row = 0
        for segment, verdict in zip(segments, verdicts, strict=True):
            if segment.sequence.request.speculates:
                rows += [first_row + row for row in verdict.accepted_rows]
                kept += range(first_row, first_row + len(verdict.accepted_rows))
            first_row += segment.rows
        index = torch.tensor(rows).to(self._device)
        picked = torch.cat([tap.index_select(0, index) for tap in taps], dim=-1)
        self._feature_pool.write(slots.index_select(0, torch.tensor(kept).to(self._device)), picked)


def _logit_rows(segments: list[Segment]) -> list[int]:
    """The rows that choose a token: each sampling segment's last token and its nodes, in order."""
    chosen: list[int] = []
    first_row = 0
    for segment in segments:
        if segment.samples:
            chosen += range(first_row + len(segment.token_ids) - 1, first_row + segment.rows)
        first_row += segment.rows
    return chosen


def _moves(rows: list[SegmentRows], verdicts: list[Verdict], block_tokens: int) -> list[tuple[int, int]]:
    """(from, to) KV slots that bring the accepted rows of each segment to its first slots."""
    return [
        (segment.slot(row, block_tokens), segment.slot(to, block_tokens))
        for segment, verdict in zip(rows, verdicts, strict=True)
        for to, row in enumerate(verdict.accepted_rows)
        if row != to
    ]


def _decide(segment: Segment, logits: torch.Tensor) -> Verdict:
    """Walk the segment's draft along the target's choices. logits: [1 + nodes, vocab], the root's row first."""
    request = segment.sequence.request
    tokens = len(segment.token_ids)
    next_position = segment.start + tokens
    greedy = argmax_rows(logits).tolist() if request.sampling.greedy else None

    def choose(index: int, depth: int) -> int:
        return greedy[index] if greedy else sample(logits[index], request.sampling, next_position + depth)

    accepted, chosen = walk(segment.draft, choose)
    log_probs = []
    if request.log_probs:
        log_probs = [log_prob(logits[i], token) for i, token in zip([0, *accepted], chosen, strict=True)]
    return Verdict([*range(tokens), *(tokens + i - 1 for i in accepted)], chosen, log_probs)
