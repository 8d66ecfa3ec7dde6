"""Kimi's tokenizer: `tiktoken.model` (bytes and their ranks) and the special tokens of tokenizer_config.json.

tiktoken joins, in each piece of the text, the two neighbours whose join has the lowest rank, until none has one; a
piece that is a token is that token. So every split of a token into two others is a merge of the token's rank, and the
`tokenizers` library does the rest (transformers' TikTokenConverter builds it the same way). Pattern and special slots:
Moonshot's tokenization_kimi.py, of which all Kimi K2 releases ship a copy.
"""

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from gateway.byte_level import spelling_of
from tandem.checkpoints.model_json import read_json, read_vocab_size
from tandem.errors import StartupError

FILE = "tiktoken.model"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What the text is cut into before tokens are formed."""


@dataclass(frozen=True)
class TiktokenModel:
    """A tokenizer whose special slots fill all ids behind the ranks, up to the target's vocabulary size."""

    tokenizer: Tokenizer
    shown: frozenset[int]
    """Special ids that have text all the same: tokenizer_config.json calls them not special (tool calls, <think>)."""


def load_tiktoken(folder: Path) -> TiktokenModel:
    """From a target's folder. StartupError naming the file and what is wrong in it."""
    ranks = _read_ranks(folder / FILE)
    vocab_size = read_vocab_size(folder)
    if len(ranks) > vocab_size:
        raise StartupError(f"{folder / FILE}: has {len(ranks)} tokens, config.json says vocab_size {vocab_size}")
    slots = {id: (f"<|reserved_token_{id}|>", True) for id in range(len(ranks), vocab_size)}
    slots |= _named_slots(folder / "tokenizer_config.json", len(ranks), vocab_size)

    tokenizer = Tokenizer(models.BPE(_vocab(ranks), _merges(ranks), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The library numbers added tokens one after another: an id that is taken or left out would shift all behind it.
    tokenizer.add_special_tokens([AddedToken(slots[id][0], normalized=False) for id in sorted(slots)])
    for id, (content, _) in slots.items():
        if tokenizer.token_to_id(content) != id:
            raise StartupError(
                f"{folder / 'tokenizer_config.json'}: added_tokens_decoder {id}: {content!r} is there twice"
            )
    return TiktokenModel(tokenizer, frozenset(id for id, (_, hidden) in slots.items() if not hidden))


def _read_ranks(path: Path) -> dict[bytes, int]:
    """token -> rank, in rank order; ranks are 0, 1, 2, ..."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise StartupError(f"{path}: line {number} is not a base64 token and its rank") from None
        if int(rank) != len(ranks) - 1:
            raise StartupError(f"{path}: line {number}: rank {int(rank)}, expected {len(ranks) - 1}, of a new token")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise StartupError(f"{path}: byte 0x{missing[0]:02x} has no rank ({len(missing)} in all)")
    return ranks


def _named_slots(path: Path, first: int, vocab_size: int) -> dict[int, tuple[str, bool]]:
    """id -> (content, special) of added_tokens_decoder."""
    named = read_json(path).get("added_tokens_decoder", {})
    slots = {}
    for key, value in named.items() if isinstance(named, dict) else ():
        content = value.get("content") if isinstance(value, dict) else None
        if not key.isdigit() or not first <= int(key) < vocab_size or not isinstance(content, str) or not content:
            raise StartupError(
                f"{path}: added_tokens_decoder {key!r}: must be an id in [{first}, {vocab_size}) with a content, "
                f"is {value!r}"
            )
        slots[int(key)] = (content, bool(value.get("special", False)))
    return slots


def _vocab(ranks: dict[bytes, int]) -> dict[str, int]:
    return {spelling_of(token): rank for token, rank in ranks.items()}


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Every split of every token into two tokens, by the rank of the whole, then of the parts."""
    merges: list[tuple[str, str]] = []
    for token in ranks:
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        known.sort(key=lambda split: (ranks[split[0]], ranks[split[1]]))
        merges += [(spelling_of(left), spelling_of(right)) for left, right in known]
    return merges
