"""CUDA graphs: replays read what the buffers hold, and no failure spoils what comes after."""

from pathlib import Path

import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.draft_tree import Draft
from tandem.graphs import CapturedSteps, CudaDriver, Fallback
from tests.fakes.random_targets import random_architecture
from tests.fakes.tiny_models import constant_draft
from tests.unit.verifier.steps import BLOCK_TOKENS, KV_BLOCKS, Hand, run
from verifier_service.buckets import BucketLimits
from verifier_service.features import FeatureProjection
from verifier_service.model_runner import ModelRunner
from verifier_service.models.loading import load_model
from verifier_service.static_step import StaticPlan

DEVICE = torch.device("cuda")
LIMITS = BucketLimits(rows=64, sequences=4, nodes=16, context=256)


class Toy:
    """y = x @ w for the first `rows` rows."""

    def __init__(self) -> None:
        self.w = torch.randn(64, 64, device=DEVICE)
        self.x, self.y = torch.zeros(8, 64, device=DEVICE), torch.zeros(8, 64, device=DEVICE)

    def step(self, rows: int) -> None:
        self.y[:rows].copy_(self.x[:rows] @ self.w)


def test_a_replay_reads_what_the_buffers_hold() -> None:
    toy = Toy()
    steps: CapturedSteps[int] = CapturedSteps(CudaDriver(DEVICE), eager_fallback=False)
    steps.capture((rows, lambda rows=rows: toy.step(rows)) for rows in (8, 4, 1))  # type: ignore[misc]
    assert all(state.captured for state in steps)
    for rows in (4, 8, 1, 4):
        toy.x.normal_()
        ran = steps.run(rows, lambda rows=rows: toy.y[:rows].cpu())  # type: ignore[misc]
        assert ran.replayed
        torch.testing.assert_close(ran.result, (toy.x[:rows] @ toy.w).cpu())


def test_a_step_that_waits_for_the_host_runs_eagerly_and_the_next_bucket_is_captured() -> None:
    toy = Toy()

    def waits() -> None:
        toy.y.fill_(float(toy.x.sum()))

    steps: CapturedSteps[int] = CapturedSteps(CudaDriver(DEVICE))
    steps.capture([(8, waits), (4, lambda: toy.step(4))])
    assert [state.captured for state in steps] == [False, True]
    toy.x.fill_(1.0)
    ran = steps.run(8, lambda: toy.y.cpu())
    assert ran.fallback is Fallback.CAPTURE
    assert torch.equal(ran.result, torch.full((8, 64), 512.0))
    assert steps.run(4, lambda: toy.y[:4].cpu()).replayed


def test_a_step_without_memory_is_dropped_with_the_larger_ones_and_smaller_ones_are_captured() -> None:
    toy = Toy()

    def huge() -> None:
        torch.empty(2**50, device=DEVICE)

    steps: CapturedSteps[int] = CapturedSteps(CudaDriver(DEVICE))
    steps.capture([(8, lambda: toy.step(8)), (4, huge), (1, lambda: toy.step(1))])
    assert [state.captured for state in steps] == [False, False, True]
    assert steps.run(8, lambda: None).fallback is Fallback.MEMORY
    toy.x.normal_()
    torch.testing.assert_close(steps.run(1, lambda: toy.y[:1].cpu()).result, (toy.x[:1] @ toy.w).cpu())


def test_captured_steps_with_taps_leave_the_features_that_eager_ones_do(tmp_path: Path) -> None:
    """bf16: chunks, plain tokens, chains and trees through buckets in turn; KV and features of the prompts."""
    random_architecture(tmp_path / "target", "qwen3")
    constant_draft(tmp_path / "draft", 500)
    model = load_model(CheckpointFolder(tmp_path / "target"), torch.bfloat16, DEVICE)
    features = FeatureProjection(tmp_path / "draft", model.config, torch.bfloat16, DEVICE)

    def runner(static: StaticPlan | None) -> ModelRunner:
        made = ModelRunner(model, features, KV_BLOCKS, BLOCK_TOKENS, DEVICE, static=static)
        made.capture()
        return made

    eager, captured = runner(None), runner(StaticPlan(LIMITS, CudaDriver(DEVICE), False, False))
    assert captured.static
    assert all(state.captured for state in captured.static.states())
    found = []
    for each in (eager, captured):
        a, b, c = (Hand(i, list(range(3 + 20 * i))) for i in range(3))
        tree = Draft([7, 8, 9, 10, 11], [0, 0, 1, 2, 3], [0.0] * 5)
        run(each, [a.segment(), b.segment(11)])
        # The drafts are wrong: what is chosen next does not depend on near-ties.
        run(each, [b.segment(), c.segment(30), a.segment(draft=tree)])
        run(each, [c.segment(), a.segment(draft=[1, 2, 3, 4]), b.segment(draft=tree)])
        run(each, [a.segment()])
        found.append((each, (a, b, c)))
    assert sum(state.runs for state in captured.static.states()) == 4
    for first, second in zip(found[0][1], found[1][1], strict=True):
        assert first.sequence.committed >= 4
        shared = min(first.sequence.request.prompt_length, second.sequence.request.prompt_length)
        pools = []
        for each, hand in ((found[0][0], first), (found[1][0], second)):
            slots = each._executor.slots(hand.blocks, 0, shared).to(DEVICE)
            kv = each._executor.kv.flatten(1, 2).index_select(1, slots).float()
            kept = each.read_features(hand.blocks, 0, shared)
            pools.append((kv, torch.frombuffer(bytearray(kept), dtype=torch.bfloat16).float()))
        torch.testing.assert_close(pools[0][0], pools[1][0], atol=0.05, rtol=0.05)
        torch.testing.assert_close(pools[0][1], pools[1][1], atol=0.1, rtol=0.1)
