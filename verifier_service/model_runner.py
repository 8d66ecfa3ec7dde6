"""Runs one step of the target: rows to tensors, forward, sampling and walk, KV and features of what was committed.

Rows of all segments lie flat: plain tokens, chains, trees and prompts mix. A tree's rows are written to consecutive KV
slots, whatever their positions; those the walk accepted move to the front afterwards.
"""

import time
from functools import partial

import torch

from tandem.draft_tree import walk
from tandem.layers.argmax import argmax_rows
from tandem.sampling import SamplingParams
from verifier_service.attention import attend, plan_attention
from verifier_service.features import FeaturePool, FeatureProjection
from verifier_service.kv_cache import PADDING_BLOCK
from verifier_service.models.llama import ForwardBatch, LlamaModel
from verifier_service.sampler import log_prob, sample
from verifier_service.sequence import Sequence, SequenceRequest
from verifier_service.step import Segment, StepResult, Verdict

MIN_ROWS = {torch.bfloat16: 2, torch.float32: 4}
"""Rows of a step at least. A linear layer's row has the same bits for any number of rows from here on (measured with
torch 2.13 on CPU), so a row of a verify step equals the same row of a plain step."""


class ModelRunner:
    """The target with its KV and feature pools."""

    def __init__(
        self,
        model: LlamaModel,
        features: FeatureProjection | None,
        kv_blocks: int,
        block_tokens: int,
        device: torch.device,
    ):
        self._model = model
        self._tap_layers = features.config.target_layer_ids if features else ()
        self._block_tokens = block_tokens
        self._device = device
        self._min_rows = MIN_ROWS[model.dtype]
        shape = model.kv_shape(kv_blocks, block_tokens)
        self._kv = torch.zeros(model.config.layers, *shape, dtype=model.dtype, device=device)
        self._feature_pool = FeaturePool(kv_blocks * block_tokens, features, model.dtype, device)

    @torch.inference_mode()
    def run(self, segments: list[Segment]) -> StepResult:
        """One target forward over all rows of all segments, and what it decides."""
        started = time.perf_counter()
        batch = self._batch(segments)
        tapped = bool(self._tap_layers) and any(s.sequence.request.speculates for s in segments)
        hidden, taps = self._model.forward(batch, list(self._kv), self._tap_layers if tapped else ())
        logits = self._logits(segments, hidden)
        forward_seconds = time.perf_counter() - started

        verdicts = []
        first_logit = 0
        for segment in segments:
            if segment.samples:
                rows = logits[first_logit : first_logit + segment.nodes + 1]
                verdicts.append(_decide(segment, rows))
                first_logit += segment.nodes + 1
            else:
                verdicts.append(Verdict(list(range(segment.rows)), [], []))
        self._compact(segments, verdicts, batch.slots)
        if tapped:
            self._keep_features(segments, verdicts, batch.slots, taps)
        return StepResult(verdicts, batch.token_ids.shape[0], forward_seconds)

    @torch.inference_mode()
    def read_features(self, blocks: list[int], start: int, count: int) -> bytes:
        """Features of committed positions [start, start + count) of a sequence with this block table."""
        return self._feature_pool.read(self._slots(blocks, start, count).to(self._device))

    def warm_up(self, max_rows: int) -> None:
        """Run steps of 1 and of max_rows rows, so that the first request does not pay for first calls."""
        count = min(max_rows, self._block_tokens)
        for rows in (1, count, 1, count):
            request = SequenceRequest("warm-up", [0] * rows, rows, SamplingParams(temperature=0.0), 1)
            sequence = Sequence.from_request(0, request)
            self.run([Segment(sequence, 0, sequence.tokens, None, True, [PADDING_BLOCK])])

    def _batch(self, segments: list[Segment]) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        slots = []
        for segment in segments:
            token_ids += segment.token_ids
            if segment.draft:
                token_ids += segment.draft.tokens
            positions += segment.positions
            slots.append(self._slots(segment.blocks, segment.start, segment.rows))
        padding = max(0, self._min_rows - len(token_ids))
        token_ids += [0] * padding
        positions += [0] * padding
        slots.append(torch.full((padding,), PADDING_BLOCK * self._block_tokens))
        c = self._model.config
        groups = plan_attention(segments, self._block_tokens, c.heads // c.kv_heads, self._model.dtype, self._device)
        return ForwardBatch(
            token_ids=torch.tensor(token_ids).to(self._device),
            positions=torch.tensor(positions).to(self._device),
            slots=torch.cat(slots).to(self._device),
            attention=partial(attend, groups=groups),
        )

    def _slots(self, blocks: list[int], start: int, count: int) -> torch.Tensor:
        size = self._block_tokens
        first, last = start // size, (start + count - 1) // size
        table = torch.tensor(blocks[first : last + 1])
        offsets = torch.arange(start - first * size, start - first * size + count)
        return table[offsets // size] * size + offsets % size

    def _logits(self, segments: list[Segment], hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the rows that choose a token: each sampling segment's last token and its nodes, in order."""
        wanted: list[int] = []
        first_row = 0
        for segment in segments:
            if segment.samples:
                wanted += range(first_row + len(segment.token_ids) - 1, first_row + segment.rows)
            first_row += segment.rows
        if not wanted:
            return hidden[:0]
        count = max(len(wanted), self._min_rows)
        if wanted == list(range(len(wanted))) and count == hidden.shape[0]:
            return self._model.logits(hidden)
        wanted += [wanted[-1]] * (count - len(wanted))
        return self._model.logits(hidden.index_select(0, torch.tensor(wanted).to(self._device)))

    def _compact(self, segments: list[Segment], verdicts: list[Verdict], slots: torch.Tensor) -> None:
        """Move the KV of accepted rows to consecutive slots, of all layers and sequences: read all, then write all."""
        source: list[int] = []
        target: list[int] = []
        first_row = 0
        for segment, verdict in zip(segments, verdicts, strict=True):
            for to, row in enumerate(verdict.accepted_rows):
                if row != to:
                    source.append(first_row + row)
                    target.append(first_row + to)
            first_row += segment.rows
        if source:
            from_slots, to_slots = slots.index_select(
                0, torch.tensor([source, target]).to(self._device).flatten()
            ).chunk(2)
            kv = self._kv.flatten(1, 2)
            kv.index_copy_(1, to_slots, kv.index_select(1, from_slots))

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
