"""A captured verify step is the same step run eagerly: what it decides, what it leaves in the KV, replay after replay.

Small models of real architectures, in bf16, with heads as wide as the real ones'.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.draft_tree import Draft
from tandem.graphs import CudaDriver, EagerDriver
from tests.fakes.random_targets import random_architecture
from tests.unit.verifier.steps import BLOCK_TOKENS, KV_BLOCKS, Hand, kv_of, run
from verifier_service.buckets import BucketLimits
from verifier_service.model_runner import ModelRunner
from verifier_service.models.decoder import DecoderModel
from verifier_service.models.loading import load_model
from verifier_service.static_step import StaticPlan

LIMITS = BucketLimits(rows=64, sequences=4, nodes=31, context=200)
VOCAB = 512
WIDE_HEADS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 512, "head_dim": 128},
    "qwen3-moe": {"hidden_size": 512, "head_dim": 128, "moe_intermediate_size": 128},
    "kimi": {
        "hidden_size": 512,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 128,
    },
}


def runner_of(model: DecoderModel, device: torch.device, captured: bool) -> ModelRunner:
    driver = CudaDriver(device) if captured and device.type == "cuda" else EagerDriver()
    plan = StaticPlan(LIMITS, driver, eager_fallback=False, together=False)
    runner = ModelRunner(model, None, KV_BLOCKS, BLOCK_TOKENS, device, static=plan)
    runner.capture()
    return runner


def tree(rng: random.Random, nodes: int) -> Draft:
    parents = [rng.randrange(i + 1) for i in range(nodes)]
    return Draft([rng.randrange(VOCAB) for _ in range(nodes)], parents, [-0.1 * i for i in range(nodes)])


def chain(rng: random.Random, nodes: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(nodes)]


@pytest.mark.parametrize("kind", list(WIDE_HEADS))
def test_captured_steps_decide_and_write_what_eager_ones_do(kind: str, tmp_path: Path, device: torch.device) -> None:
    """Prompts, decoding, blocks and trees in turn, over sequences of several lengths, each with other inputs than the
    replay before. Eager steps are the same function in the same shapes; steps without buckets come near."""
    random_architecture(tmp_path, kind, **WIDE_HEADS[kind])
    model = load_model(CheckpointFolder(tmp_path), torch.bfloat16, device)
    captured, eager = runner_of(model, device, True), runner_of(model, device, False)
    dynamic = ModelRunner(model, None, KV_BLOCKS, BLOCK_TOKENS, device)
    if device.type == "cuda":
        assert all(bucket.captured for bucket in captured.buckets())
    rng = random.Random(0)
    lengths = (1, BLOCK_TOKENS, 45)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    sides = [[Hand(i, list(prompt)) for i, prompt in enumerate(prompts)] for _ in range(3)]
    for step in range(12):
        drafts: list[Any] = [None] * len(lengths)
        if step:  # Of the first step, the prompts' own, nothing is drafted.
            drafts = [(None, chain(rng, 7), tree(rng, 13))[(step + i) % 3] for i in range(len(lengths))]
        taking_part = range(len(lengths)) if step % 4 != 3 else range(1)
        chosen = [
            run(runner, [hands[i].segment(draft=drafts[i]) for i in taking_part])
            for runner, hands in zip((captured, eager), sides, strict=False)
        ]
        assert chosen[0] == chosen[1], (kind, step)
        for ours, theirs in zip(*sides[:2], strict=True):
            assert_same_kv(captured, eager, ours, theirs, 0.01)
    run(dynamic, [hand.segment() for hand in sides[2]])
    for ours, theirs in zip(sides[0], sides[2], strict=True):
        # Other shapes are summed in another order, which shows in bf16.
        assert_same_kv(captured, dynamic, ours, theirs, 0.05)
    if device.type == "cuda":
        assert sum(bucket.runs for bucket in captured.buckets()) == 12


def assert_same_kv(captured: ModelRunner, other: ModelRunner, ours: Hand, theirs: Hand, tolerance: float) -> None:
    """As far as both have committed: what a layer keeps of a token differs by at most `tolerance` of its length."""
    count = min(ours.sequence.committed, theirs.sequence.committed)
    of_captured, of_other = (kv_of(runner, hand, count).float() for runner, hand in ((captured, ours), (other, theirs)))
    apart = (of_captured - of_other).flatten(2).norm(dim=-1) / of_other.flatten(2).norm(dim=-1)
    assert apart.max() < tolerance


def test_a_replay_depends_on_its_inputs_only(tmp_path: Path, device: torch.device) -> None:
    """The same step twice, with another of the same bucket between, gives the same bits."""
    random_architecture(tmp_path, "qwen3", **WIDE_HEADS["qwen3"])
    model = load_model(CheckpointFolder(tmp_path), torch.bfloat16, device)
    runner = runner_of(model, device, True)
    rng = random.Random(1)

    def step(prompt: list[int]) -> tuple[list[list[int]], torch.Tensor]:
        hand = Hand(0, list(prompt))
        return run(runner, [hand.segment()]), kv_of(runner, hand, len(prompt)).clone()

    first, other = ([rng.randrange(VOCAB) for _ in range(20)] for _ in range(2))
    chosen, kv = step(first)
    others_kv = step(other)[1]
    again, kv_again = step(first)
    assert again == chosen
    assert torch.equal(kv_again, kv)
    assert not torch.equal(others_kv, kv)
