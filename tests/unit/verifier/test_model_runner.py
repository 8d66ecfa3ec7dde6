"""The target's forward: equal to transformers, and a row's bits do not depend on what shares its step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tandem.sampling import SamplingParams
from tests.fakes.tiny_models import constant_draft, random_target
from tests.unit.verifier.steps import BLOCK_TOKENS, Hand, make_runner, run

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=["plain", "tied", "llama3 rope"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("target")
    changes = {"rope_parameters": LLAMA3_ROPE} if request.param == "llama3 rope" else {}
    model = random_target(folder, **changes)
    if request.param == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(folder)
    return folder, model


def oracle_logits(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def test_logits_equal_transformers_for_prefill_decode_and_block_verify(target: tuple[Path, LlamaForCausalLM]) -> None:
    """fp32, tolerance 2e-4: prompts prefilled in chunks over block borders, several sequences in one step."""
    folder, oracle = target
    runner, model = make_runner(folder)
    hands = [Hand(i, tokens(length, i)) for i, length in enumerate((1, 37, 16, 70))]
    for chunk in (10, 23):
        run(runner, [h.segment(min(chunk, h.sequence.uncommitted)) for h in hands if h.sequence.uncommitted > 1])
    run(runner, [h.segment() for h in hands if h.sequence.uncommitted > 0 and h.sequence.emitted == 0])
    for _ in range(2):
        prefixes = [list(h.sequence.tokens) for h in hands]
        drafts = [tokens(7, 50 + i) for i in range(4)]
        segments = [h.segment(draft=d) for h, d in zip(hands, drafts, strict=True)]
        run(runner, segments)
        for i, (prefix, draft) in enumerate(zip(prefixes, drafts, strict=True)):
            rows = model.last_logits[i * 8 : (i + 1) * 8]
            expected = oracle_logits(oracle, prefix + draft)[-8:]
            torch.testing.assert_close(rows, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_rows_have_the_bits_of_plain_decode_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    """Batch invariance: the same position gives the same logits bits alone, as row of a block, and in a batch."""
    random_target(tmp_path)
    runner, model = make_runner(tmp_path, dtype)
    prompt, follow = tokens(45, 1), tokens(8, 2)

    def decode(number: int) -> list[torch.Tensor]:
        hand = Hand(number, prompt + follow[:1])
        rows = []
        for i in range(8):
            run(runner, [hand.segment()])
            rows.append(model.last_logits[0].clone())
            del hand.sequence.tokens[len(prompt) + 1 + i :]
            hand.sequence.tokens += follow[i + 1 : i + 2]
        return rows

    alone = decode(0)
    verified = Hand(1, prompt + follow[:1])
    run(runner, [verified.segment(len(prompt))])
    run(runner, [verified.segment(draft=follow[1:])])
    block = model.last_logits[:8].clone()
    batch = [Hand(i, prompt + follow[:1]) for i in range(2, 8)]
    run(runner, [h.segment(len(prompt)) for h in batch])
    run(runner, [h.segment(draft=follow[1:]) for h in batch])
    for i in range(1, 8):
        assert torch.equal(alone[i], block[i]), f"row {i} of the block differs from plain decoding"
        assert torch.equal(model.last_logits[3 * 8 + i], block[i]), f"row {i} differs in a batch"


def test_accepted_rows_stop_at_the_targets_own_choice(tmp_path: Path) -> None:
    random_target(tmp_path)
    runner, _ = make_runner(tmp_path)
    plain = Hand(0, tokens(20, 3))
    for _ in range(9):
        run(runner, [plain.segment()])
    truth = plain.sequence.tokens[20:]
    for right in range(8):
        hand = Hand(1, tokens(20, 3))
        run(runner, [hand.segment()])
        wrong = [(t + 1) % 512 for t in truth]
        draft = truth[1 : right + 1] + wrong[right + 1 : 8]
        assert run(runner, [hand.segment(draft=draft)]) == [truth[1 : right + 2]]
        assert hand.sequence.committed == 20 + 1 + right


def test_sampled_tokens_do_not_depend_on_drafts(tmp_path: Path) -> None:
    """Position-keyed: the same seed gives the same tokens with right, wrong and no drafts."""
    random_target(tmp_path)
    runner, _ = make_runner(tmp_path)
    sampling = SamplingParams(temperature=0.9, top_p=0.9, seed=77)
    plain = Hand(0, tokens(20, 4), sampling)
    for _ in range(17):
        run(runner, [plain.segment()])
    hand = Hand(1, tokens(20, 4), sampling)
    run(runner, [hand.segment()])
    while hand.sequence.emitted < 17:
        at = hand.sequence.emitted
        truth = plain.sequence.tokens[20 + at : 20 + at + 5] or [0]
        run(runner, [hand.segment(draft=[*truth[:3], 5, 6])])
    assert hand.sequence.tokens[20:37] == plain.sequence.tokens[20:37]


def test_features_are_those_of_the_committed_tokens_whatever_the_chunking(tmp_path: Path) -> None:
    """Oracle: transformers' hidden states after the tap layers, fc and RMSNorm written out."""
    oracle = random_target(tmp_path / "target")
    draft = constant_draft(tmp_path / "draft", mask_token=3)
    runner, _ = make_runner(tmp_path / "target", draft_folder=draft)
    hand = Hand(0, tokens(50, 5))
    for chunk in (7, 20, 23):
        run(runner, [hand.segment(chunk)])
    run(runner, [hand.segment(draft=tokens(7, 6))])
    committed = hand.sequence.tokens[: hand.sequence.committed]
    with torch.inference_mode():
        states = oracle(torch.tensor([committed]), output_hidden_states=True).hidden_states
    fc = load_file(draft / "model.safetensors")["fc.weight"]
    fused = torch.cat([states[1][0], states[2][0]], dim=-1) @ fc.T
    expected = fused * torch.rsqrt(fused.square().mean(-1, keepdim=True) + 1e-6)
    raw = runner.read_features(hand.blocks, 0, len(committed))
    got = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(len(committed), -1)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
    part = runner.read_features(hand.blocks, BLOCK_TOKENS - 3, 9)
    assert part == raw[(BLOCK_TOKENS - 3) * 512 : (BLOCK_TOKENS + 6) * 512]


def test_features_of_blocks_that_changed_hands_are_the_last_owners(tmp_path: Path) -> None:
    """Taps wait for their projection; those of a sequence that ended must not overwrite the next one's."""
    random_target(tmp_path / "target")
    draft = constant_draft(tmp_path / "draft", mask_token=3)
    runner, _ = make_runner(tmp_path / "target", draft_folder=draft)
    fresh, _ = make_runner(tmp_path / "target", draft_folder=draft)
    first, second, alone = (Hand(0, tokens(20, seed)) for seed in (1, 2, 2))
    run(runner, [first.segment()])
    run(runner, [second.segment()])
    run(fresh, [alone.segment()])
    assert runner.read_features(second.blocks, 0, 20) == fresh.read_features(alone.blocks, 0, 20)


def test_log_probs_are_the_targets(tmp_path: Path) -> None:
    oracle = random_target(tmp_path)
    runner, _ = make_runner(tmp_path)
    hand = Hand(0, tokens(12, 8))
    object.__setattr__(hand.sequence.request, "log_probs", True)
    (verdict,) = runner.run([hand.segment()]).verdicts
    expected = torch.log_softmax(oracle_logits(oracle, tokens(12, 8))[-1], -1)[verdict.token_ids[0]]
    assert verdict.log_probs == [pytest.approx(float(expected), abs=1e-4)]
