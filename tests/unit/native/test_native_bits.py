"""The native path keeps invariant 1 in bf16 and in 4 bits: a row of a block or a tree has the bits of plain decoding,
whatever shares its step and however many threads compute it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch

from tests.fakes.random_targets import random_architecture
from tests.unit.native.runners import native_model, native_target
from tests.unit.test_gguf_convert import run_convert, tiny_llama, weights_of, write_gguf
from tests.unit.verifier.steps import BLOCK_TOKENS, CPU, Hand, run
from tests.unit.verifier.test_tree_verify import BUSHY, LINE, STAR, WIDE, Target, check_rows, primed, prompt, tree
from verifier_service.models.target_model import Features
from verifier_service.step import SegmentRows
from verifier_service.step_executor import StepExecutor

TINY_VOCAB = 288
KINDS = ["llama, llama3 rope", "qwen3", "4bit"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("target")
        if kind != "4bit":
            random_architecture(folder, kind)
            return folder
        write_gguf(folder / "q4.gguf", weights_of(tiny_llama(tied=True)), gguf.GGMLQuantizationType.Q4_1)
        run_convert(folder / "q4.gguf", folder / "model", keep_blocks=True)
        return folder / "model"

    return cache(make)


@pytest.fixture(scope="module")
def target_of(folder_of: Callable[[str], Path]) -> Callable[[str], Target]:
    return cache(lambda kind: native_target(folder_of(kind)))


def tokens_for(kind: str, length: int, seed: int) -> list[int]:
    return [token % TINY_VOCAB for token in prompt(length, seed)] if kind == "4bit" else prompt(length, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nodes_row_has_the_bits_of_plain_decoding(target_of: Callable[[str], Target], kind: str) -> None:
    """Trees of several shapes in one step, behind prompts that end inside and at the end of a vector and a block."""
    shapes = {"bushy": (1, BUSHY), "line": (47, LINE), "star": (80, STAR), "wide": (93, WIDE)}
    prompts = [tokens_for(kind, length, i) for i, (length, _) in enumerate(shapes.values())]
    drafts = [tree(parents, i) for i, (_, parents) in enumerate(shapes.values())]
    if kind == "4bit":
        for draft in drafts:
            draft.tokens[:] = [token % TINY_VOCAB for token in draft.tokens]
    check_rows(target_of(kind), prompts, drafts)


def test_far_behind_the_prompts_start_too(target_of: Callable[[str], Target]) -> None:
    check_rows(target_of("qwen3"), [prompt(509, 0)], [tree(BUSHY, 1)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_may_come_in_any_chunks(target_of: Callable[[str], Target], kind: str) -> None:
    """Prefilled whole, in chunks beside another sequence, or token by token, it is followed by the same logits."""
    target, tokens = target_of(kind), tokens_for(kind, 70, 5)
    expected = target.plain_row(tuple(tokens), ())
    beside = primed(target.runner, 1, tokens_for(kind, 20, 6))
    for number, chunk in ((2, 23), (3, 1)):
        hand = Hand(number, tokens, blocks=42)
        while hand.sequence.uncommitted > 1:
            run(target.runner, [beside.segment(), hand.segment(min(chunk, hand.sequence.uncommitted - 1))])
            del beside.sequence.tokens[20:]
            beside.sequence.committed = 19
        run(target.runner, [hand.segment()])
        assert torch.equal(target.model.last_logits[0], expected)


def test_the_number_of_threads_changes_no_bit(folder_of: Callable[[str], Path]) -> None:
    rows = []
    for threads in (1, 2, 5):
        target = native_target(folder_of("qwen3"), threads)
        hands = [primed(target.runner, i, prompt(n, i)) for i, n in enumerate((40, 77))]
        rows.append(target.verified(hands, [tree(WIDE, 1), tree(LINE, 2).tokens]))
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("int8", [False, True])
def test_features_have_the_same_bits_whatever_shares_the_step(folder_of: Callable[[str], Path], int8: bool) -> None:
    """Prompts of two sequences together, one after the other, row by row; in 8 bits they are off by a percent."""
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 2 * 128, generator=random).bfloat16()
    norm = torch.rand(48, generator=random).bfloat16()
    model = native_model(folder_of("qwen3"))
    first, second = prompt(37, 1), prompt(21, 2)
    one, other = [1, 5, 3], [4, 2]

    def features(steps: list[list[SegmentRows]], in_int8: bool) -> torch.Tensor:
        executor = StepExecutor(model, 8, BLOCK_TOKENS, CPU)
        pool = torch.zeros(8 * BLOCK_TOKENS, 48, dtype=torch.bfloat16)
        with torch.inference_mode():
            for segments in steps:
                executor.forward(segments, Features((1, 0), model.projection(weight, norm, 1e-5, in_int8), pool))
        return pool

    alone = [SegmentRows(0, 0, first, [], one)], [SegmentRows(1, 0, second, [], other)]
    singly = [[SegmentRows(0, i, [token], [], one)] for i, token in enumerate(first)]
    found = features([alone[0] + alone[1]], int8)
    assert torch.equal(features([*alone], int8), found)
    assert torch.equal(features([*singly, alone[1]], int8), found)
    exact = features([*alone], False).float()
    off = ((found.float() - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-30))[exact.any(dim=1)]
    assert len(off) == len(first) + len(second)
    assert off.max() < 0.02
    assert bool(off.any()) is int8
