"""Every architecture's logits equal transformers' (fp32, tolerance 5e-5): prefill in chunks, decode, block and tree
verify, on one rank and over several, however attention and experts are split."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tandem.draft_tree import Draft
from tests.fakes.random_targets import KINDS, random_architecture
from tests.fakes.trees import random_tree
from tests.unit.verifier.steps import Hand, RecordingModel, make_runner, on_ranks, run
from verifier_service.model_runner import ModelRunner
from verifier_service.models.loading import Placement

TREE = [0, 0, 1, 1, 2, 0, 4, 3, 7, 7]
MIXTURES = ["qwen3-moe", "mixtral", "deepseek-v3", "kimi"]


class Target:
    """A folder and transformers' logits for it."""

    def __init__(self, folder: Path, kind: str):
        self.folder = folder
        self._oracle: PreTrainedModel = random_architecture(folder, kind)
        self.next_logits = cache(self._next_logits)

    def _next_logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self._oracle(torch.tensor([tokens])).logits[0, -1]
        return logits


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    return cache(lambda kind: Target(tmp_path_factory.mktemp("target"), kind))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_step(
    target: Target, runner: ModelRunner, model: RecordingModel, hands: list[Hand], drafts: list[Draft | None]
) -> None:
    """Run a step and compare every row that chooses a token."""
    expected = []
    for hand, draft in zip(hands, drafts, strict=True):
        known = tuple(hand.sequence.tokens)
        paths = [known]
        for parent, token in zip(draft.parents, draft.tokens, strict=True) if draft else ():
            paths.append((*paths[parent], token))
        expected += [target.next_logits(path) for path in paths]
    run(runner, [h.segment(draft=d) for h, d in zip(hands, drafts, strict=True)])
    torch.testing.assert_close(model.last_logits[: len(expected)], torch.stack(expected), atol=5e-5, rtol=5e-5)


def check(target: Target, runner: ModelRunner, model: RecordingModel) -> None:
    first, second = hands = [Hand(0, tokens(40, 1)), Hand(1, tokens(19, 2))]
    run(runner, [first.segment(33)])
    check_step(target, runner, model, hands, [None, None])
    check_step(target, runner, model, [second], [None])
    block, tree = Draft.block(tokens(7, 3), [0.0] * 7), random_tree(TREE, 512, 4)
    check_step(target, runner, model, hands, [block, tree])
    # Guess what it says, so that a tree's accepted rows move.
    then = int(target.next_logits(tuple(second.sequence.tokens)).argmax())
    beyond = int(target.next_logits((*second.sequence.tokens, then)).argmax())
    right = Draft([5, then, 6, beyond], [0, 0, 1, 2], [0.0] * 4)
    check_step(target, runner, model, hands, [None, right])
    assert second.sequence.committed == 24, "the walk went another way"
    check_step(target, runner, model, hands, [None, None])


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(target_of: Callable[[str], Target], kind: str) -> None:
    target = target_of(kind)
    check(target, *make_runner(target.folder))


def check_ranks(
    target: Target, size: int, split_attention: bool, cut_experts: bool, placement: Placement | None = None
) -> None:
    on_ranks(target.folder, size, split_attention, cut_experts, partial(check, target), placement)


@pytest.mark.parametrize("cut", [False, True], ids=["whole experts", "cut experts"])
@pytest.mark.parametrize("split", [False, True], ids=["tp 1", "tp = ep"])
@pytest.mark.parametrize("size", [2, 8], ids=["ep 2", "ep 8"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_over_ranks(target_of: Callable[[str], Target], kind: str, size: int, split: bool, cut: bool) -> None:
    check_ranks(target_of(kind), size, split, cut)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MIXTURES])
def test_other_kinds_over_eight_ranks(target_of: Callable[[str], Target], kind: str) -> None:
    """Of dense targets only attention, MLP and head are split; with 2 keys for 8 ranks four hold the same one."""
    check_ranks(target_of(kind), 8, split_attention=True, cut_experts=False)


def test_experts_may_live_anywhere(target_of: Callable[[str], Target]) -> None:
    """Unevenly, in any order, and on one layer not told."""
    odd = [e for e in range(16) if e % 2]
    check_ranks(target_of("qwen3-moe"), 2, False, False, {1: [[*odd, 4], [e for e in range(0, 16, 2) if e != 4]]})
