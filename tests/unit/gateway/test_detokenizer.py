"""Joined pieces equal `Tokenizer.decode` of all ids, no piece splits a character, little is kept back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gateway.detokenizer import BYTE_RUN_LIMIT
from gateway.tokenizer import TargetTokenizer
from tests.fakes import tokenizers

FAMILIES = {
    "byte_level": tokenizers.byte_level(),
    "byte_fallback": tokenizers.byte_fallback(),
    "word_piece": tokenizers.word_piece(),
}
SPELLING_OF_BYTE = bytes_to_unicode()
WRAPPED = {name: TargetTokenizer(tokenizer, None) for name, tokenizer in FAMILIES.items()}


def joined(tokenizer: TargetTokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    pieces = [text for id in ids if tokenizer.has_text(id) for text in detokenizer.push(id)]
    return "".join([*pieces, detokenizer.finish()])


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_ids_decode_as_the_library_decodes_them(family: str, data: st.DataObject) -> None:
    """Any ids, invalid UTF-8, special tokens and ids beyond the vocabulary among them."""
    size = WRAPPED[family].vocab_size
    # Runs of bytes longer than BYTE_RUN_LIMIT may differ by design; 30 ids cannot hold one.
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=min(30, BYTE_RUN_LIMIT)))
    assert joined(WRAPPED[family], ids) == decoded(FAMILIES[family], ids)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0x80, 0xFF) | st.sampled_from([0x41, 0xE4, 0xF0, 0x9F, 0xEF, 0xBF, 0xBD]), max_size=200))
def test_random_bytes_decode_as_the_library_decodes_them(data: list[int]) -> None:
    """Broken UTF-8 in every form: U+FFFD appears where and as often as decoding everything at once puts it."""
    ids = [FAMILIES["byte_level"].token_to_id(SPELLING_OF_BYTE[byte]) for byte in data]
    assert joined(WRAPPED["byte_level"], ids) == decoded(FAMILIES["byte_level"], ids)


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_text_comes_back(family: str, text: str) -> None:
    """Encoding and decoding any text gives what the library's decode gives, which holds the text itself."""
    ids = WRAPPED[family].encode(text)
    if family == "byte_level":
        assert joined(WRAPPED[family], ids) == text
    elif len(ids) < BYTE_RUN_LIMIT:
        assert joined(WRAPPED[family], ids) == decoded(FAMILIES[family], ids)


def test_a_character_over_several_tokens_comes_with_its_last_one() -> None:
    tokenizer = WRAPPED["byte_level"]
    ids = tokenizer.encode("𓀀")
    assert len(ids) == 4, "the corpus does not know hieroglyphs"
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(id) for id in ids] == [("", ""), ("", ""), ("", ""), ("", "𓀀")]


def test_an_invalid_start_belongs_to_the_earlier_token() -> None:
    tokenizer = WRAPPED["byte_level"]
    first, *_ = tokenizer.encode("𓀀")
    (letter,) = tokenizer.encode("Q")
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(first) == ("", "")
    assert detokenizer.push(letter) == ("�", "Q")


def test_byte_level_keeps_back_less_than_a_character() -> None:
    """However long a stretch of broken bytes is, at most three bytes wait: U+FFFD comes as it is decided."""
    tokenizer = WRAPPED["byte_level"]
    lead = tokenizer.encode("𓀀")[0]
    detokenizer = tokenizer.detokenizer()
    shown = 0
    for count in range(1, 1000):
        shown += sum(map(len, detokenizer.push(lead)))
        assert shown == count - 1
    assert detokenizer.finish() == "�"


def test_a_long_valid_run_of_byte_tokens_streams() -> None:
    """Text in a script the vocabulary lacks, without a space, does not wait for its end."""
    tokenizer = WRAPPED["byte_fallback"]
    ids = [id for id in tokenizer.encode("ကခ" * 100) if tokenizer.spelling(id).startswith("<0x")]
    assert len(ids) == 600
    detokenizer = tokenizer.detokenizer()
    text, kept_back = "", []
    for count, id in enumerate(ids, 1):
        text += "".join(detokenizer.push(id))
        kept_back.append(count - len(text.encode()))
    assert max(kept_back) <= BYTE_RUN_LIMIT + 3
    assert text + detokenizer.finish() == "ကခ" * 100


def test_a_byte_run_that_turns_out_invalid_is_replaced_byte_by_byte() -> None:
    tokenizer, raw = WRAPPED["byte_fallback"], FAMILIES["byte_fallback"]
    ids = [raw.token_to_id(t) for t in ("a", "<0xE4>", "<0xB8>", "<0xAD>", "<0xFF>", "▁the")]
    assert joined(tokenizer, ids) == raw.decode(ids) == "a���� the"
