"""Mixtures of experts and latent attention keep the promise of invariant 1 in fp32: a row of a block or a tree has the
bits of plain decoding, whatever shares its step. Tiny random targets."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.fakes.random_targets import random_architecture
from tests.unit.verifier.steps import RecordingModel, make_runner, on_ranks, run
from tests.unit.verifier.test_tree_verify import BUSHY, LINE, Target, check_rows, primed, prompt, tree
from verifier_service.model_runner import ModelRunner

WIDE_LATENT = {"kv_lora_rank": 512, "num_hidden_layers": 2}
"""Latent and rotated key as wide as the real ones, 576."""


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    def make(kind: str) -> Target:
        folder = tmp_path_factory.mktemp("target")
        random_architecture(folder, kind.removesuffix(", wide"), **(WIDE_LATENT if kind.endswith("wide") else {}))
        return Target(*make_runner(folder))

    return cache(make)


@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral", "deepseek-v3", "kimi, wide"])
def test_a_nodes_row_has_the_bits_of_plain_decoding(target_of: Callable[[str], Target], kind: str) -> None:
    """Blocks and trees of several sequences in one step, one of them across a block."""
    prompts, shapes = [prompt(n, n) for n in (1, 45)], [LINE[:6], BUSHY]
    check_rows(target_of(kind), prompts, [tree(parents, i) for i, parents in enumerate(shapes)])


def test_latent_keys_of_a_tree_across_a_node_tile(target_of: Callable[[str], Target]) -> None:
    check_rows(target_of("kimi, wide"), [prompt(254, 0)], [tree([0, 0, 1, 1, 2], 1)])


@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v3"])
def test_a_prompts_rows_have_the_bits_of_decoding(target_of: Callable[[str], Target], kind: str) -> None:
    """Prefilled whole or token by token, a prompt is followed by the same logits: keys and values agree too."""
    target, tokens = target_of(kind), prompt(70, 5)
    whole = primed(target.runner, 0, tokens)
    run(target.runner, [whole.segment()])
    expected = target.model.last_logits[0].clone()
    stepwise = primed(target.runner, 1, tokens[:1])
    stepwise.sequence.tokens[:] = tokens
    while stepwise.sequence.committed < len(tokens):
        run(target.runner, [stepwise.segment(1)])
    assert torch.equal(target.model.last_logits[0], expected)


@pytest.mark.parametrize("cut", [False, True], ids=["whole experts", "cut experts"])
def test_over_ranks_too(tmp_path: Path, cut: bool) -> None:
    """What the ranks add up has the same bits in every step."""
    random_architecture(tmp_path, "deepseek-v3")

    def check(runner: ModelRunner, model: RecordingModel) -> None:
        check_rows(Target(runner, model), [prompt(20, 1)], [tree(BUSHY, 1)])

    on_ranks(tmp_path, 2, True, cut, check)


def test_padding_rows_wake_no_expert(target_of: Callable[[str], Target]) -> None:
    """A step of one real row is padded for the linears; routing counts the real one only."""
    target = target_of("deepseek-v3")
    hand = primed(target.runner, 0, prompt(9, 1))
    result = target.runner.run([hand.segment()])
    assert result.rows > 1
    assert [ids.shape for ids in target.model.routing] == [(1, 4)] * 2
