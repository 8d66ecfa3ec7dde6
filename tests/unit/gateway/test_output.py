"""What clients see: text, ids and log-probabilities cut together, the same whatever the verifier's grouping."""

import codecs
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gateway.output import Ending, Output, Piece
from gateway.tokenizer import TargetTokenizer
from tests.fakes import tokenizers

RAW = tokenizers.byte_level()
TOKENIZER = TargetTokenizer(RAW, None)
ENCODED = [TOKENIZER.encode(text) for text in ("a", "ab", " the", "quick brown", "é", "中", "🙂", "\n\n", "lazy dog")]
BYTE_OF_SPELLING = {spelling: byte for byte, spelling in bytes_to_unicode().items()}
LEAD_BYTE, *_ = TOKENIZER.encode("𓀀")
HALF = next(id for id in TOKENIZER.encode("naï") if RAW.decode([id]).endswith("a\ufffd"))
"""A letter and the beginning of a character."""
BROKEN = [[LEAD_BYTE], [HALF], [tokenizers.EOS], [TOKENIZER.vocab_size + 1]]


TOKENS = st.sampled_from([id for ids in ENCODED + BROKEN for id in ids])
STOPS = st.lists(
    st.sampled_from(
        ["b t", "the", "é中", "\n", "k bro", "z", "\ufffd", "\ufffda", "🙂", "quick", "ick", "a\ufffd", "\ufffdab"]
    ),
    max_size=4,
)


def output(stop_strings: list[str], stop_token_ids: frozenset[int] = frozenset(), max_tokens: int = 10_000) -> Output:
    return Output(TOKENIZER.detokenizer(), TOKENIZER.has_text, stop_strings, stop_token_ids, max_tokens)


def run(out: Output, chunks: list[list[int]]) -> list[Piece]:
    """Feed chunks with log-probability = -id until the output ends; end it by length if it has not."""
    pieces = []
    for chunk in chunks:
        pieces.append(out.push(chunk, [-float(id) for id in chunk]))
        if out.ending:
            return pieces
    return [*pieces, out.end(Ending())]


def text_of(ids: list[int]) -> str:
    return RAW.decode(ids, skip_special_tokens=True)


def bytes_of(ids: list[int]) -> bytes:
    spelled = [RAW.id_to_token(id) or "" for id in ids if id not in range(len(tokenizers.SPECIAL))]
    return bytes(BYTE_OF_SPELLING[character] for character in "".join(spelled))


def needed(ids: list[int], text: str) -> list[int]:
    """The fewest first ids that hold all bytes of the first characters of their text: those that make up `text`."""
    spans: list[int] = []

    def replace(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        spans.append(error.end)
        return "\ufffd", error.end

    codecs.register_error("note", replace)
    whole = bytes_of(ids)
    ends = [0]
    while len(ends) <= len(text):
        # One character more, or one maximal invalid part.
        start, character = ends[-1], text[len(ends) - 1]
        size = len(character.encode())
        if whole[start : start + size] != character.encode():
            spans.clear()
            whole[start:].decode("utf-8", "note")
            size = spans[0]
        ends.append(start + size)
    return next(ids[:n] for n in range(len(ids) + 1) if len(bytes_of(ids[:n])) >= ends[-1])


def joined_ids(pieces: list[Piece]) -> list[int]:
    return [id for piece in pieces for id in piece.token_ids]


def joined_text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def expected(
    ids: list[int], stops: list[str], stop_ids: frozenset[int], max_tokens: int
) -> tuple[str, list[int], Ending]:
    """From the whole: up to the token that ends it, the first stop string in its text, the ids needed for it."""
    at = next((i for i, id in enumerate(ids) if id in stop_ids), None)
    if at is not None and at < max_tokens:
        kept, text, ending = ids[: at + 1], text_of(ids[:at]), Ending(stop_token_id=ids[at])
    else:
        kept = ids[:max_tokens]
        text, ending = text_of(kept), Ending()
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            text = text[: end - len(stop)]
            return text, needed(ids, text), Ending(stop_string=stop)
    return text, kept, ending


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(borders)]


@settings(max_examples=1000, deadline=None)
@given(
    ids=st.lists(TOKENS, max_size=30),
    cuts=st.lists(st.integers(0, 1000), max_size=8),
    stops=STOPS,
    stop_ids=st.frozensets(TOKENS, max_size=1),
    max_tokens=st.integers(1, 40),
)
def test_any_chunking_gives_what_the_whole_says(
    ids: list[int], cuts: list[int], stops: list[str], stop_ids: frozenset[int], max_tokens: int
) -> None:
    """Text, ids, log-probabilities and the reason, against a search of the complete text."""
    out = output(stops, stop_ids, max_tokens)
    pieces = run(out, chunked(ids, cuts))
    text, kept, ending = expected(ids, stops, stop_ids, max_tokens)
    assert (joined_text(pieces), joined_ids(pieces), out.ending) == (text, kept, ending)
    assert [p for piece in pieces for p in piece.log_probs] == [-float(id) for id in kept]
    assert out.completion_tokens == len(kept)


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(TOKENS, max_size=30), stops=STOPS.filter(bool))
def test_every_released_id_is_needed_for_the_text_released_with_it(ids: list[int], stops: list[str]) -> None:
    """With stop strings, ids never run ahead of the text: no id that a later stop string would cut has gone out."""
    out = output(stops)
    text, released = "", []
    for id in ids:
        piece = out.push([id], [])
        if out.ending:
            return
        text += piece.text
        released += piece.token_ids
        assert released == needed(ids, text)


def test_without_stop_strings_every_id_goes_out_at_once() -> None:
    out = output([])
    ids = TOKENIZER.encode("𓀀")
    assert [out.push([id], []) for id in ids] == [
        *(Piece("", [id]) for id in ids[:-1]),
        Piece("𓀀", ids[-1:]),
    ]


def test_a_stop_string_in_the_middle_of_a_block() -> None:
    """Text before it stays; the token that holds both the end of the text and the stop string's start is kept."""
    ids = [*TOKENIZER.encode("ab"), *TOKENIZER.encode(" the"), *TOKENIZER.encode("quick brown"), tokenizers.EOS]
    out = output(["he"], frozenset({tokenizers.EOS}))
    piece = out.push(ids, [])
    assert piece.text == "ab t"
    assert out.ending == Ending(stop_string="he")
    assert text_of(piece.token_ids).startswith("ab t")
    assert not text_of(piece.token_ids[:-1]).startswith("ab t")


@pytest.mark.parametrize("last", ["max_tokens", "eos"])
def test_a_stop_string_completed_by_the_last_token_wins(last: str) -> None:
    (z,) = TOKENIZER.encode("z")
    out = output(["z"], frozenset({tokenizers.EOS}), max_tokens=1 if last == "max_tokens" else 2)
    out.push([z] if last == "max_tokens" else [z, tokenizers.EOS], [])
    assert out.ending == Ending(stop_string="z")


def test_a_stop_token_has_no_text_but_is_streamed_and_counted() -> None:
    (z,) = TOKENIZER.encode("z")
    out = output([], frozenset({z}))
    assert out.push([z, z], []) == Piece("", [z])
    assert (out.ending, out.completion_tokens) == (Ending(stop_token_id=z), 1)


def test_a_replacement_character_belongs_to_the_token_that_left_its_bytes() -> None:
    """Also if that token has gone out already, for text of its own: the next one is not needed for it."""
    (z,) = TOKENIZER.encode("z")
    out = output(["z"])
    assert out.push([HALF], []) == Piece(text_of([HALF])[:-1], [HALF])
    assert out.push([z], []) == Piece("\ufffd")
    assert out.ending == Ending(stop_string="z")


def test_what_was_kept_back_goes_out_at_the_end() -> None:
    """A beginning of a stop string, and a character that stays incomplete."""
    out = output(["abX"])
    ids = [*TOKENIZER.encode("ab"), LEAD_BYTE]
    assert not out.push(ids, [])
    assert out.end(Ending()) == Piece("ab\ufffd", ids)
