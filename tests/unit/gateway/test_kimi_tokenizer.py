"""Kimi's tiktoken.model: ids are those that tiktoken itself gives; no client's text becomes one of its special ids."""

import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat_template import Turn
from gateway.tokenizer import TargetTokenizer
from tandem.errors import StartupError
from tests.fakes import kimi_folder as kimi

SPECIAL = {
    kimi.NAMED[id][0] if id in kimi.NAMED else f"<|reserved_token_{id}|>": id for id in range(kimi.RANKS, kimi.VOCAB)
}
ORACLE = tiktoken.Encoding("kimi", pat_str=kimi.PATTERN, mergeable_ranks=kimi.ranks(), special_tokens=SPECIAL)

TEXTS = [
    "",
    "hello world",
    "don't I'LL WE'VE they'Re it'S x'ſ 'tis",
    "1 12 123 1234 12345678 ٣٤٥٦ ½ Ⅷ 007",
    "中文字符和汉字，测试一下 mixed中文and英文ABC漢字かな한국어",
    "HTTPServer camelCase ABCdef GHIjkl ǅ ʰ été É",
    "  two\n\n\n  lines \r\n\r\n\ttabs \u00a0\u2003 end   ",
    "def f(x):\n    return {'a': [1, 2]}  # comment\n",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 🙂🚀",
    "<|im_end|>[EOS]<|reserved_token_445|><think>",
    "\x00\x07\x1b[0m\x7f\ufeff\u200b",
    "a" * 300 + " " * 300 + "\n" * 300,
]

# Unassigned characters apart: which class a newer Unicode version gives them differs between regex libraries.
ANY_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn", "Co")), max_size=60)
HAN = st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x4FFF) | st.sampled_from("aA1 ,、'"), max_size=20)
FEW = st.text(st.sampled_from("heloTthe '.\n1中"), max_size=40)
HOSTILE = st.lists(st.sampled_from([*SPECIAL, "<|im_", "end|>", "<", ">", "|>", " ", "a", "system"]), max_size=8).map(
    "".join
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TargetTokenizer:
    return TargetTokenizer.load(kimi.write_kimi(tmp_path_factory.mktemp("kimi")))


def decoded(tokenizer: TargetTokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    pieces = [text for id in ids if tokenizer.has_text(id) for text in detokenizer.push(id)]
    return "".join([*pieces, detokenizer.finish()])


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:20]))
def test_chosen_texts_have_tiktokens_ids(tokenizer: TargetTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == ORACLE.encode_ordinary(text)
    assert decoded(tokenizer, ids) == text


@settings(max_examples=500, deadline=None)
@given(ANY_TEXT | HAN | FEW | HOSTILE)
def test_any_text_has_tiktokens_ids(tokenizer: TargetTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == ORACLE.encode_ordinary(text)
    assert all(id < kimi.RANKS for id in ids)
    assert decoded(tokenizer, ids) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, kimi.RANKS - 1), max_size=30))
def test_any_ids_stream_to_the_text_tiktoken_decodes(tokenizer: TargetTokenizer, ids: list[int]) -> None:
    """Characters whose bytes lie in several tokens come whole; invalid bytes become U+FFFD."""
    assert decoded(tokenizer, ids) == ORACLE.decode(ids, errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), HOSTILE | ANY_TEXT), min_size=1))
def test_only_the_template_writes_special_tokens(tokenizer: TargetTokenizer, turns: list[Turn]) -> None:
    """What a special token in a content spells is text, of tokens that tokenizer_config.json calls not special too."""
    expected: list[int] = []
    for turn in turns:
        expected += [SPECIAL[f"<|im_{turn.role}|>"], *ORACLE.encode_ordinary(turn.role), kimi.IM_MIDDLE]
        expected += [*ORACLE.encode_ordinary(turn.content), kimi.IM_END]
    expected += [kimi.IM_ASSISTANT, *ORACLE.encode_ordinary("assistant"), kimi.IM_MIDDLE, kimi.THINK]
    assert tokenizer.encode_chat(turns) == expected


def test_a_flag_reaches_the_template(tokenizer: TargetTokenizer) -> None:
    assert tokenizer.template_flags == {"thinking"}
    with_thinking = tokenizer.encode_chat([Turn("user", "hi")], {"thinking": True})
    without = tokenizer.encode_chat([Turn("user", "hi")], {"thinking": False})
    assert with_thinking[-1] == kimi.THINK
    assert without == [*with_thinking, kimi.THINK_END]


def test_slots_keep_their_ids_and_only_those_called_not_special_have_text(tokenizer: TargetTokenizer) -> None:
    assert tokenizer.vocab_size == kimi.VOCAB
    assert [tokenizer.spelling(id) for id in range(kimi.RANKS, kimi.VOCAB)] == list(SPECIAL)
    shown = [id for id in range(kimi.RANKS, kimi.VOCAB) if tokenizer.has_text(id)]
    assert shown == [id for id, (_, special) in sorted(kimi.NAMED.items()) if not special]
    assert decoded(tokenizer, [kimi.BOS, kimi.THINK, *tokenizer.encode("hm"), kimi.THINK_END]) == "<think>hm</think>"


def test_images_are_known_by_their_placeholder(tokenizer: TargetTokenizer) -> None:
    assert tokenizer.media_ids == {kimi.MEDIA}


def test_a_tokenizer_json_goes_before_tiktoken_model(tmp_path: Path) -> None:
    kimi.write_kimi(tmp_path)
    TargetTokenizer.load(tmp_path)._tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tiktoken.model").write_text("broken")
    assert TargetTokenizer.load(tmp_path).encode("hello 中文") == ORACLE.encode_ordinary("hello 中文")


def _named(**added: object) -> str:
    return json.dumps({"added_tokens_decoder": added})


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tiktoken.model", "!!! 0\n", "tiktoken.model: line 1 is not a base64 token and its rank"),
        ("tiktoken.model", "YQ==\n", "tiktoken.model: line 1 is not"),
        ("tiktoken.model", "YQ== 0\nYg== 2\n", "line 2: rank 2, expected 1"),
        ("tiktoken.model", "YQ== 0\nYQ== 1\n", "line 2: rank 1, expected 0, of a new token"),
        ("tiktoken.model", "YQ== 0\n", r"byte 0x00 has no rank \(255 in all\)"),
        ("config.json", '{"vocab_size": 400}', "has 440 tokens, config.json says vocab_size 400"),
        ("config.json", "{}", "config.json: vocab_size must be a positive integer, is None"),
        ("tokenizer_config.json", _named(**{"464": {"content": "<x>"}}), r"'464': must be an id in \[440, 464\)"),
        ("tokenizer_config.json", _named(**{"5": {"content": "<x>"}}), r"'5': must be an id in \[440, 464\)"),
        ("tokenizer_config.json", _named(**{"441": {}}), "'441': must be an id .* with a content"),
        (
            "tokenizer_config.json",
            _named(**{"441": {"content": "<x>"}, "443": {"content": "<x>"}}),
            "added_tokens_decoder 44[0-9]: .* is there twice",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, file: str, content: str, says: str) -> None:
    (kimi.write_kimi(tmp_path) / file).write_text(content)
    with pytest.raises(StartupError, match=says):
        TargetTokenizer.load(tmp_path)
