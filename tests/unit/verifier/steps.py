"""Driving a model runner by hand: one sequence's rows at a time, no scheduler."""

from pathlib import Path

import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from verifier_service.features import FeatureProjection
from verifier_service.model_runner import ModelRunner
from verifier_service.models.llama import LlamaModel
from verifier_service.sequence import Sequence, SequenceRequest
from verifier_service.step import Segment

BLOCK_TOKENS = 16
CPU = torch.device("cpu")


class RecordingModel(LlamaModel):
    """Keeps the logits it gave."""

    last_logits: torch.Tensor

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.last_logits = super().logits(hidden)
        return self.last_logits


def make_runner(
    folder: Path, dtype: torch.dtype = torch.float32, draft_folder: Path | None = None
) -> tuple[ModelRunner, RecordingModel]:
    model = RecordingModel(CheckpointFolder(folder), dtype, CPU)
    features = FeatureProjection(draft_folder, model.config, dtype, CPU) if draft_folder else None
    return ModelRunner(model, features, 257, BLOCK_TOKENS, CPU), model


class Hand:
    """A sequence with its own fixed blocks."""

    def __init__(self, number: int, tokens: list[int], sampling: SamplingParams | None = None, blocks: int = 16):
        request = SequenceRequest(str(number), tokens, len(tokens), sampling or SamplingParams(temperature=0.0), 1000)
        self.sequence = Sequence.from_request(number, request)
        # Not in order, so that nothing relies on neighbouring blocks.
        self.blocks = list(range(1 + number * blocks, 1 + (number + 1) * blocks))[::-1]

    def segment(self, count: int | None = None, draft: list[int] | Draft | None = None) -> Segment:
        """The next `count` uncommitted tokens (all by default), then a block of draft tokens, or a tree."""
        sequence = self.sequence
        end = len(sequence.tokens) if count is None else sequence.committed + count
        return Segment(
            sequence,
            sequence.committed,
            sequence.tokens[sequence.committed : end],
            Draft.block(draft, [0.0] * len(draft)) if isinstance(draft, list) else draft,
            end == len(sequence.tokens),
            self.blocks,
        )


def run(runner: ModelRunner, segments: list[Segment]) -> list[list[int]]:
    """Run a step and take over its verdicts; returns the chosen tokens per segment."""
    result = runner.run(segments)
    for segment, verdict in zip(segments, result.verdicts, strict=True):
        segment.sequence.committed += len(verdict.accepted_rows)
        segment.sequence.append(verdict.token_ids)
    return [v.token_ids for v in result.verdicts]


def kv_of(runner: ModelRunner, hand: Hand, count: int) -> torch.Tensor:
    """Keys and values of a sequence's first positions: [layers, count, 2, kv heads, head_dim]."""
    slots = [hand.blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(count)]
    return runner._kv.flatten(1, 2)[:, slots]
