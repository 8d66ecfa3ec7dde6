"""Verifying trees: a node's row has the bits of plain decoding along its path, and what is accepted leaves no trace of
having been a tree: KV, features and the tokens that follow are those of plain decoding (fp32; tiny random targets)."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from tests.fakes.tiny_models import VOCAB, constant_draft, random_target
from tests.fakes.trees import random_tree, token_paths, tree_around
from tests.unit.verifier.steps import Hand, RecordingModel, kv_of, make_runner, run
from verifier_service.model_runner import ModelRunner

LINE = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
STAR = [0] * 9
BUSHY = [0, 0, 1, 1, 2, 0, 4, 3, 7, 7]
WIDE = [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
"""LINE, BUSHY and WIDE have 11 rows: of three heads each, one would be alone in the kernel's last query block."""


def tree(parents: list[int], seed: int) -> Draft:
    return random_tree(parents, VOCAB, seed)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(1000 + seed).choices(range(VOCAB), k=length)


def primed(runner: ModelRunner, number: int, tokens: list[int], sampling: SamplingParams | None = None) -> Hand:
    """A sequence with all tokens but the last in the KV."""
    hand = Hand(number, tokens, sampling, blocks=42)
    if len(tokens) > 1:
        run(runner, [hand.segment(len(tokens) - 1)])
    return hand


class Target:
    """A tiny target, and its rows by plain decoding."""

    def __init__(self, runner: ModelRunner, model: RecordingModel):
        self.runner, self.model = runner, model
        self.plain_row = cache(self._plain_row)

    def verified(self, hands: list[Hand], drafts: list[Draft | list[int] | None]) -> torch.Tensor:
        """Logits of all rows of a step that commits nothing."""
        self.runner.run([h.segment(draft=d) for h, d in zip(hands, drafts, strict=True)])
        return self.model.last_logits.clone()

    def _plain_row(self, tokens: tuple[int, ...], path: tuple[int, ...]) -> torch.Tensor:
        """Logits after tokens + path, decoded token by token behind the prompt."""
        hand = primed(self.runner, 5, list(tokens))
        for token in path:
            run(self.runner, [hand.segment()])
            hand.sequence.tokens[hand.sequence.committed :] = [token]
        run(self.runner, [hand.segment()])
        return self.model.last_logits[0].clone()


def grouped_target(folder: Path, heads: int, kv_heads: int) -> Path:
    random_target(folder, hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    return folder


@pytest.fixture(scope="module", params=[(8, 2), (9, 3)], ids=["4 heads per kv head", "3 heads per kv head"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(*make_runner(grouped_target(tmp_path_factory.mktemp("target"), *request.param)))


def check_rows(target: Target, prompts: list[list[int]], drafts: list[Draft]) -> None:
    rows = iter(target.verified([primed(target.runner, i, p) for i, p in enumerate(prompts)], list(drafts)))
    for tokens, draft in zip(prompts, drafts, strict=True):
        for path in [(), *token_paths(draft)]:
            expected = target.plain_row(tuple(tokens), path)
            assert torch.equal(next(rows), expected), f"behind {len(tokens)} tokens, {draft.parents}, path {path}"


@pytest.mark.parametrize("parents", [LINE, STAR, BUSHY, WIDE], ids=["line", "star", "bushy", "wide"])
@pytest.mark.parametrize("length", [1, 45, 250, 509], ids=lambda n: f"{n} tokens")
def test_a_nodes_row_has_the_bits_of_plain_decoding(target: Target, parents: list[int], length: int) -> None:
    """Also where the tree crosses a block, a node tile (256 keys) and a key tile (512)."""
    check_rows(target, [prompt(length, 0)], [tree(parents, 1)])


shapes = st.integers(1, 10).flatmap(lambda n: st.tuples(*(st.integers(0, i) for i in range(n)))).map(list)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 40), shapes), min_size=2, max_size=4))
def test_trees_of_different_sizes_share_a_step(target: Target, batch: list[tuple[int, list[int]]]) -> None:
    """No tree sees another, whatever their shapes and prefixes."""
    check_rows(target, [prompt(n, i) for i, (n, _) in enumerate(batch)], [tree(p, i) for i, (_, p) in enumerate(batch)])


def test_a_nodes_row_is_close_to_plain_decoding_in_bf16(tmp_path: Path) -> None:
    """Most rows have its very bits; the others are off by roundings only."""
    target = Target(*make_runner(grouped_target(tmp_path, 9, 3), torch.bfloat16))
    tokens, draft = prompt(45, 3), tree(BUSHY, 3)
    rows = target.verified([primed(target.runner, 0, tokens)], [draft])
    plain = torch.stack([target.plain_row(tuple(tokens), path) for path in [(), *token_paths(draft)]])
    assert sum(torch.equal(a, b) for a, b in zip(rows, plain, strict=True)) >= 9
    torch.testing.assert_close(rows, plain, atol=0.03, rtol=0.03)


def test_plain_rows_blocks_trees_and_prompts_mix_in_a_step(target: Target) -> None:
    """Each sees what it sees alone, and the prompt's chunk is written whole."""
    prompts = [prompt(n, i) for i, n in enumerate((20, 33, 17, 28))]
    drafts: list[Draft | list[int] | None] = [None, tree(LINE, 1).tokens, tree(BUSHY, 2), tree(STAR, 3)]
    alone = [
        target.verified([primed(target.runner, i, p)], [d])[: len(d or []) + 1]
        for i, (p, d) in enumerate(zip(prompts, drafts, strict=True))
    ]
    segments = [
        primed(target.runner, i, p).segment(draft=d) for i, (p, d) in enumerate(zip(prompts, drafts, strict=True))
    ]
    long = Hand(4, prompt(60, 9), blocks=42)
    run(target.runner, [*segments[:2], long.segment(40), *segments[2:]])
    assert torch.equal(target.model.last_logits, torch.cat(alone))
    run(target.runner, [long.segment()])
    assert torch.equal(target.model.last_logits[0], target.plain_row(tuple(prompt(60, 9)), ()))


def emit_plainly(runner: ModelRunner, hand: Hand, count: int) -> Hand:
    for _ in range(count):
        run(runner, [hand.segment()])
    return hand


def emit_with_trees(runner: ModelRunner, hands: list[Hand], truths: list[list[int]], count: int) -> int:
    """Emit `count` tokens per sequence, or a few more, with a tree each in every step; returns the most accepted."""
    rng = random.Random(7)
    most = 0
    while any(h.sequence.emitted < count for h in hands):
        drafts = [
            tree_around(t[h.sequence.emitted :], rng.randint(2, 12), VOCAB, rng)
            for h, t in zip(hands, truths, strict=True)
        ]
        chosen = run(runner, [h.segment(draft=d) for h, d in zip(hands, drafts, strict=True)])
        most = max(most, *(len(c) - 1 for c in chosen))
    return most


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_walks_emit_what_plain_decoding_emits(target: Target, temperature: float) -> None:
    """Token for token with the same seed, and the KV that is left has plain decoding's bits at committed positions."""
    runner = target.runner
    sampling = [SamplingParams(temperature=temperature, top_p=0.95, seed=50 + i) for i in range(2)]
    prompts = [prompt(13, 1), prompt(30, 2)]
    plain = [emit_plainly(runner, primed(runner, 3 + i, prompts[i], sampling[i]), 48) for i in range(2)]
    truths = [h.sequence.tokens[len(p) :] for h, p in zip(plain, prompts, strict=True)]
    hands = [primed(runner, i, prompts[i], sampling[i]) for i in range(2)]
    assert emit_with_trees(runner, hands, truths, 24) >= 3, "the drafts never led the walk far"
    for hand, true in zip(hands, plain, strict=True):
        committed = hand.sequence.committed
        assert hand.sequence.tokens == true.sequence.tokens[: len(hand.sequence.tokens)]
        assert torch.equal(kv_of(runner, hand, committed), kv_of(runner, true, committed))


def test_features_are_those_of_plain_decoding(tmp_path: Path) -> None:
    """Of every committed token, root included, at the position it was committed to."""
    random_target(tmp_path / "target")
    runner, _ = make_runner(tmp_path / "target", draft_folder=constant_draft(tmp_path / "draft", mask_token=3))
    plain = emit_plainly(runner, primed(runner, 1, prompt(13, 1)), 48)
    hand = primed(runner, 0, prompt(13, 1))
    assert emit_with_trees(runner, [hand], [plain.sequence.tokens[13:]], 24) >= 3
    assert hand.sequence.tokens == plain.sequence.tokens[: len(hand.sequence.tokens)]
    got, expected = (
        torch.frombuffer(bytearray(runner.read_features(h.blocks, 0, hand.sequence.committed)), dtype=torch.float32)
        for h in (hand, plain)
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
