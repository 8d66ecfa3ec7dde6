"""A small target folder with the tokenizer files that Kimi K2 releases have: tiktoken.model and no tokenizer.json."""

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from tests.fakes.bpe_oracle import byte_alphabet

# Written out as Moonshot's tokenization_kimi.py joins it, apart from the product's own spelling of it.
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)  # fmt: skip

RANKS = 440
SLOTS = 24
VOCAB = RANKS + SLOTS
BOS, EOS, IM_END, IM_USER, IM_ASSISTANT, IM_SYSTEM, IM_MIDDLE, CALL, THINK, THINK_END = (
    RANKS + n for n in (0, 1, 2, 3, 4, 10, 17, 11, 18, 19)
)
MEDIA = RANKS + 21
NAMED: dict[int, tuple[str, bool]] = {
    BOS: ("[BOS]", True),
    EOS: ("[EOS]", True),
    IM_END: ("<|im_end|>", True),
    IM_USER: ("<|im_user|>", True),
    IM_ASSISTANT: ("<|im_assistant|>", True),
    IM_SYSTEM: ("<|im_system|>", True),
    IM_MIDDLE: ("<|im_middle|>", True),
    CALL: ("<|tool_call_begin|>", False),
    THINK: ("<think>", False),
    THINK_END: ("</think>", False),
    MEDIA: ("<|media_pad|>", True),
}
"""id -> (content, special); the other slots have no name."""

TEMPLATE = (
    "{%- for m in messages -%}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{%- endfor -%}"
    "<|im_assistant|>assistant<|im_middle|>"
    "{%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog; don't they'll we've I'M it's, while the rain in Spain stays.",
    "def main():\n    print('hello, world')\n\n\treturn 12345 + 678\r\n\r\nsystem user assistant <|im_end|> [EOS]",
    "中文字符和汉字，测试一下中文的分词。漢字かな交じり文 한국어 кириллица Größe façade naïve ﬀ 🙂🚀👍🏽 ٣٤٥",
]


@cache
def ranks() -> dict[bytes, int]:
    """A byte-pair encoding trained on a few lines: all bytes, in no simple order, then the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=RANKS, initial_alphabet=alphabet, min_frequency=1, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    byte_of = {character: byte for byte, character in byte_alphabet().items()}
    vocab = tokenizer.get_vocab()
    found = {bytes(byte_of[c] for c in spelled): rank for spelled, rank in vocab.items()}
    assert len(found) == RANKS
    return dict(sorted(found.items(), key=lambda item: item[1]))


def write_kimi(folder: Path, **changes: Any) -> Path:
    """The folder as far as the gateway reads it; `changes` of config.json."""
    config = {"model_type": "kimi_k25", "text_config": {"vocab_size": VOCAB}, "media_placeholder_token_id": MEDIA}
    tokenizer_config = {
        "added_tokens_decoder": {str(id): {"content": c, "special": special} for id, (c, special) in NAMED.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks().items())
    (folder / "tiktoken.model").write_text("".join(lines))
    return folder
