"""The two ways the target runs here, one token of many slots and whole sequences, against each other and an oracle."""

from pathlib import Path

import pytest
import torch

from draft_training.prefill import TapComputer
from draft_training.slot_decoder import SlotDecoder
from tandem.errors import StartupError
from tests.fakes.random_targets import random_architecture
from tests.unit.native.runners import native_model, round_weights
from tests.unit.training.worlds import CPU, chatting_target, load_target
from verifier_service.models.target_model import TargetModel

TAPS = (2, 0)


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 512, (n,), generator=generator).tolist() for n in (1, 17, 6, 30, 2)]


def decode_in_slots(model: TargetModel, texts: list[list[int]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Per text [tokens, width] and [tokens, vocab]. Slot i begins i steps late: what a slot computes is not another
    slot's position."""
    decoder = SlotDecoder(model, len(texts), 40, TAPS, CPU)
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in range(40):
        now = [min(max(step - i, 0), len(text) - 1) for i, text in enumerate(texts)]
        out = decoder.step([text[n] for text, n in zip(texts, now, strict=True)], now)
        for i, text in enumerate(texts):
            if 0 <= step - i < len(text):
                rows[i].append(out.taps[i])
                logits[i].append(out.logits[i])
    return [torch.stack(part) for part in rows], [torch.stack(part) for part in logits]


def test_prefill_equals_decoding_and_transformers(tmp_path: Path) -> None:
    """Whole sequences, however they are batched, give the rows that decoding them in slots of any age gives, and
    transformers' logits."""
    oracle = chatting_target(tmp_path / "target")
    model, texts = load_target(tmp_path / "target"), sequences()
    rows, logits = decode_in_slots(model, texts)
    for max_rows in (8, 2048):
        for computed, decoded in zip(TapComputer(model, TAPS, CPU, max_rows).rows(texts), rows, strict=True):
            assert computed.dtype == torch.bfloat16
            torch.testing.assert_close(computed.float(), decoded, rtol=2**-7, atol=1e-4)
    with torch.inference_mode():
        for text, found in zip(texts, logits, strict=True):
            expected = oracle(torch.tensor([text])).logits[0]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_native_path_gives_the_same_rows(tmp_path: Path) -> None:
    """Decoded in slots, as whole sequences or behind a beginning they are the same bits, and those of fp32 arithmetic
    but for what bf16 rounds: up to 1 % measured."""
    chatting_target(tmp_path)
    round_weights(tmp_path)
    oracle, model, texts = load_target(tmp_path), native_model(tmp_path), sequences()
    rows, logits = decode_in_slots(model, texts)
    expected_rows, expected_logits = decode_in_slots(oracle, texts)
    for ours, theirs in zip(rows + logits, expected_rows + expected_logits, strict=True):
        assert ((ours - theirs).norm(dim=1) <= 0.02 * theirs.norm(dim=1)).all()
    for max_rows in (8, 2048):
        for computed, decoded in zip(TapComputer(model, TAPS, CPU, max_rows).rows(texts), rows, strict=True):
            assert torch.equal(computed, decoded.bfloat16())
    text, half = texts[3], 15
    decoder = SlotDecoder(model, 1, 40, TAPS, CPU)
    beginning = decoder.prefix(text[:half])
    decoder.begin_with(0, beginning)
    rest = [decoder.step([text[n]], [n]).taps[0] for n in range(half, len(text))]
    assert torch.equal(torch.cat([beginning.taps, torch.stack(rest)]), rows[3])


@pytest.mark.parametrize("kind", ["qwen3-moe", "kimi"])
def test_mixtures_and_latent_attention_run_here_too(tmp_path: Path, kind: str) -> None:
    """Prefill and decoding both give transformers' logits."""
    oracle, texts = random_architecture(tmp_path, kind), sequences()
    model = load_target(tmp_path)
    computed = TapComputer(model, TAPS, CPU).rows(texts)
    for text, rows in zip(texts[1:], computed[1:], strict=True):
        decoder, half = SlotDecoder(model, 1, 40, TAPS, CPU), len(text) // 2
        decoder.begin_with(0, decoder.prefix(text[:half]))
        last = [decoder.step([text[n]], [n]) for n in range(half, len(text))][-1]
        with torch.inference_mode():
            expected = oracle(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(last.logits[0], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last.taps[0], rows[-1].float(), rtol=2**-7, atol=1e-4)


def test_a_slot_forgets_what_it_held(tmp_path: Path) -> None:
    """A new conversation in a slot, begun at position 0 or behind a prefix, sees nothing of the one before."""
    chatting_target(tmp_path / "target")
    model, (_, old, _, new, _) = load_target(tmp_path / "target"), sequences()

    def decode(decoder: SlotDecoder, tokens: list[int], start: int = 0) -> torch.Tensor:
        return torch.stack([decoder.step([t], [n]).logits[0] for n, t in enumerate(tokens)][start:])

    fresh = decode(SlotDecoder(model, 1, 40, TAPS, CPU), new)
    decoder = SlotDecoder(model, 1, 40, TAPS, CPU)
    decode(decoder, old)
    torch.testing.assert_close(decode(decoder, new), fresh, rtol=1e-5, atol=1e-5)
    decoder.begin_with(0, decoder.prefix(old[:9]))
    behind = torch.stack([decoder.step([t], [n]).logits[0] for n, t in enumerate(old) if n >= 9])
    expected = decode(SlotDecoder(model, 1, 40, TAPS, CPU), old, start=9)
    torch.testing.assert_close(behind, expected, rtol=1e-4, atol=1e-4)


def test_more_than_the_target_holds_is_refused(tmp_path: Path) -> None:
    """At start, not in the middle of a conversation."""
    chatting_target(tmp_path / "target", max_position_embeddings=64)
    with pytest.raises(StartupError, match="65 tokens: the target has 64"):
        SlotDecoder(load_target(tmp_path / "target"), 2, 65, TAPS, CPU)
