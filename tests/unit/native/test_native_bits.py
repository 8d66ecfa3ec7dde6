"""The native path keeps invariant 1 in bf16 and in 4 bits: a row of a block or a tree has the bits of plain decoding,
whatever shares its step and however many threads compute it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
import torch.nn.functional as F

from tests.fakes.random_targets import random_architecture
from tests.unit.native.runners import native_target
from tests.unit.test_gguf_convert import run_convert, tiny_llama, weights_of, write_gguf
from tests.unit.verifier.steps import Hand, run
from tests.unit.verifier.test_tree_verify import BUSHY, LINE, STAR, WIDE, Target, check_rows, primed, prompt, tree

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


def test_a_projection_beside_the_target_is_the_normed_product_whatever_rows_share_it(
    folder_of: Callable[[str], Path],
) -> None:
    """Products of bf16 values are exact in fp32: only sums and the result round."""
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x = torch.randn(21, 96, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    norm = torch.rand(48, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    project = native_target(folder_of("qwen3"), 2).model.projection(weight, norm, 1e-5)
    together = project(x)
    oracle = F.rms_norm(x.double() @ weight.double().T, (48,), norm.double(), 1e-5)
    torch.testing.assert_close(together.double(), oracle, rtol=2**-8, atol=1e-6)
    assert torch.equal(together, torch.cat([project(row[None]) for row in x]))


def test_a_projection_in_int8_is_the_same_but_for_a_percent_whatever_rows_share_it(
    folder_of: Callable[[str], Path],
) -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x = torch.randn(21, 96, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    norm = torch.rand(48, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    model = native_target(folder_of("qwen3"), 2).model
    exact, project = model.projection(weight, norm, 1e-5)(x).float(), model.projection(weight, norm, 1e-5, int8=True)
    together = project(x)
    off = (together.float() - exact).norm(dim=1) / exact.norm(dim=1)
    assert off.min() > 0
    assert off.max() < 0.015
    assert torch.equal(together, torch.cat([project(row[None]) for row in x]))
