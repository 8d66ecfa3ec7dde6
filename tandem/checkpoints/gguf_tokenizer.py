"""The tokenizer of a GGUF file as a Hugging Face tokenizer.json.

Byte-level BPE only (`tokenizer.ggml.model` "gpt2"). A GGUF names its pre-tokenizer instead of spelling it out
(`tokenizer.ggml.pre`); PRE_TOKENIZERS holds those known here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.errors import StartupError

_CONTROL, _USER_DEFINED = 3, 4

PRE_TOKENIZERS: dict[str, Callable[[], list[pre_tokenizers.PreTokenizer]]] = {
    "gpt-2": lambda: [],
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True)],
}
"""`tokenizer.ggml.pre`: the steps before the byte-level split."""

SPECIAL_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Name in GGUF keys (tokenizer.ggml.X_token_id): name in Hugging Face keys (X_token)."""


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer described by the GGUF's `tokenizer.*` metadata.

    Bytes that the vocabulary lacks are dropped, as the published SmolLM2 tokenizer and llama.cpp do: mapping them to
    the unknown token would let ordinary text produce a special token. StartupError names `source` and the key.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise StartupError(f"{source}: tokenizer.ggml.model {kind!r} is not supported, only 'gpt2' (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        raise StartupError(f"{source}: tokenizer.ggml.pre {pre!r} is not supported, only {sorted(PRE_TOKENIZERS)}")
    if metadata.get("tokenizer.ggml.add_bos_token"):
        raise StartupError(f"{source}: tokenizer.ggml.add_bos_token true is not supported")
    for key in ("tokens", "token_type", "merges"):
        if f"tokenizer.ggml.{key}" not in metadata:
            raise StartupError(f"{source}: tokenizer.ggml.{key} is missing")

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise StartupError(f"{source}: tokenizer.ggml.tokens has duplicates, or token_type another length")
    try:
        merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # tokenizers raises bare Exception for a merge outside the vocabulary
        raise StartupError(f"{source}: tokenizer.ggml.merges: {error}") from None

    spaced = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*PRE_TOKENIZERS[pre](), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind_of_token in zip(tokens, types, strict=True):
        if kind_of_token == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind_of_token == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    return tokenizer


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the special roles the GGUF names, by Hugging Face name: bos, eos, unk, pad."""
    ids = {hf: metadata.get(f"tokenizer.ggml.{gguf}_token_id") for gguf, hf in SPECIAL_ROLES.items()}
    return {role: index for role, index in ids.items() if index is not None}


def tokenizer_config(metadata: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by role, the context length and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        # PreTrainedTokenizerFast takes tokenizer.json as it is; GPT2Tokenizer would put its own pre-tokenizer instead.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
    }
    config |= {f"{role}_token": tokens[index] for role, index in special_token_ids(metadata).items()}
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise ValueError(f"{merge!r} is not two tokens with a space between")
    return left, right
