"""Driving a model runner by hand: one sequence's rows at a time, no scheduler."""

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from tests.fakes.thread_ranks import run_ranks
from verifier_service.features import FeatureProjection
from verifier_service.model_runner import ModelRunner
from verifier_service.models.decoder import DecoderModel
from verifier_service.models.loading import Placement, load_model
from verifier_service.parallel.ranks import Parallel
from verifier_service.sequence import Sequence, SequenceRequest
from verifier_service.static_step import StaticPlan
from verifier_service.step import RankStep, Segment
from verifier_service.step_executor import StepExecutor

BLOCK_TOKENS = 16
KV_BLOCKS = 257
CPU = torch.device("cpu")


class RecordingModel:
    """A target that keeps the logits it gave."""

    def __init__(self, model: DecoderModel):
        self.model = model
        self.last_logits = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.last_logits = self.model.logits(hidden)
        return self.last_logits


def make_runner(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    draft_folder: Path | None = None,
    static: StaticPlan | None = None,
) -> tuple[ModelRunner, RecordingModel]:
    model = RecordingModel(load_model(CheckpointFolder(folder), dtype, CPU))
    features = FeatureProjection(draft_folder, model.config, dtype, CPU) if draft_folder else None
    runner = ModelRunner(model, features, KV_BLOCKS, BLOCK_TOKENS, CPU, static=static)
    runner.capture()
    return runner, model


def on_ranks(
    folder: Path,
    size: int,
    split_attention: bool,
    cut_experts: bool,
    check: Callable[[ModelRunner, RecordingModel], None],
    placement: Placement | None = None,
) -> None:
    """Rank 0 does what `check` does with its runner, the others compute what they are told."""
    mailboxes: list[SimpleQueue[RankStep | None]] = [SimpleQueue() for _ in range(size)]

    def tell(step: RankStep | None) -> None:
        for mailbox in mailboxes[1:]:
            mailbox.put(step)

    def work(parallel: Parallel) -> None:
        model = load_model(CheckpointFolder(folder), torch.float32, CPU, parallel, placement)
        if parallel.ranks.rank == 0:
            recording = RecordingModel(model)
            try:
                check(ModelRunner(recording, None, KV_BLOCKS, BLOCK_TOKENS, CPU, tell), recording)
            finally:
                tell(None)
            return
        executor = StepExecutor(model, KV_BLOCKS, BLOCK_TOKENS, CPU)
        while step := mailboxes[parallel.ranks.rank].get():
            executor.move(step.moves)
            hidden = executor.forward(step.segments).hidden
            if model.head_is_split:
                executor.logits(hidden, step.logit_rows)

    run_ranks(size, split_attention, cut_experts, work)


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
    """KV of a sequence's first positions: [layers, count, ...]."""
    slots = [hand.blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(count)]
    return runner._executor.kv.flatten(1, 2)[:, slots]
