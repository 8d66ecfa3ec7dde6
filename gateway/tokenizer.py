"""The target's tokenizer: text and conversations to token ids and back.

Text from clients never becomes a special token, whatever it spells: only the chat template, and clients that send
token ids, can put special tokens into a prompt. Which tokens are special is what tokenizer.json says ("special": true);
of a tiktoken model (gateway/tiktoken_model.py) all that are not in tiktoken.model are.

For a prompt that is simple: it is encoded with special tokens switched off. In a conversation the template's special
tokens must come out as such, and templates may build them from pieces, trim contents, or branch on them. So what is
encoded is the rendered text as a whole, unless a content spells a special token (or could complete one together with
the template's text next to it). Then that spelling goes through the template as a marker, every special token in the
rendered text is the template's own, and the text between two of them that holds a marker is encoded with the spelling
put back and special tokens switched off.
"""

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway import tiktoken_model
from gateway.byte_level import token_bytes
from gateway.chat_template import NO_FLAGS, ChatTemplate, Flags, Turn
from gateway.detokenizer import ByteLevelDetokenizer, Detokenizer, GeneralDetokenizer
from gateway.target_files import read_chat_template, read_media_token_ids
from tandem.errors import StartupError, invalid

_SLICE = 1 << 16
"""Characters encoded at once where only the number of tokens matters."""

_SLICE_BORDER = 64
"""Tokens that cutting a text in two may add."""

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TargetTokenizer:
    """Safe to use from several threads. Encoding releases the GIL."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        shown: frozenset[int] = frozenset(),
        media_ids: frozenset[int] = frozenset(),
    ):
        """shown: special ids that have text; media_ids: ids that stand for an image or video."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True
        self._chat_template = chat_template
        self.template_flags = chat_template.flags if chat_template else frozenset()
        """Variables of the chat template that a request may set."""
        self.media_ids = media_ids
        special = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special_ids = frozenset(special)
        self._hidden_ids = self._special_ids - shown
        self._special_strings = sorted(set(special.values()))
        self._beginnings = tuple({s[:n] for s in self._special_strings for n in range(1, len(s))})
        self._endings = tuple({s[n:] for s in self._special_strings for n in range(1, len(s))})
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        """Ids are below this."""
        self._byte_level = _is_byte_level(tokenizer)
        self._spellings = [tokenizer.id_to_token(id) for id in range(self.vocab_size)]
        self._bytes = [token_bytes(s) for s in self._spellings] if self._byte_level else []

    @classmethod
    def load(cls, folder: Path) -> "TargetTokenizer":
        """From tokenizer.json, or else tiktoken.model, and the chat template of a target's folder; StartupError names
        the file."""
        path = folder / "tokenizer.json"
        shown: frozenset[int] = frozenset()
        if path.is_file():
            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises plain Exception
                raise StartupError(f"{path}: cannot be read: {error}") from None
        elif (folder / tiktoken_model.FILE).is_file():
            model = tiktoken_model.load_tiktoken(folder)
            tokenizer, shown = model.tokenizer, model.shown
        else:
            raise StartupError(f"{path}: is missing, and there is no {tiktoken_model.FILE}")
        source = read_chat_template(folder)
        try:
            return cls(tokenizer, ChatTemplate(source) if source else None, shown, read_media_token_ids(folder))
        except StartupError as error:
            raise StartupError(f"{folder}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, none of them special, nothing added."""
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def surely_exceeds(self, texts: Sequence[str], limit: int) -> bool:
        """Whether long texts have more than `limit` tokens together, as far as little memory can tell: encoding takes
        about 200 bytes per character, so what cannot fit anyway is found out slice by slice. False if in doubt."""
        if sum(map(len, texts)) <= _SLICE:
            return False
        count = 0
        for text in texts:
            for start in range(0, len(text), _SLICE):
                count += len(self.encode(text[start : start + _SLICE])) - _SLICE_BORDER
                if count > limit:
                    return True
        return False

    def encode_chat(self, turns: Sequence[Turn], flags: Flags = NO_FLAGS) -> list[int]:
        """The ids of a conversation, up to where the assistant's answer begins; InvalidRequest naming `messages` if the
        target has no chat template or its template refuses the turns. flags: of template_flags."""
        if self._chat_template is None:
            raise invalid("messages", "the target has no chat template; use prompt or token_ids")
        marker = _Marker()
        shielded = [Turn(turn.role, self._shield(turn.content, marker)) for turn in turns]
        rendered = self._chat_template.render(shielded, flags)
        encoding = self._encode_with_special(rendered)
        if not marker.used:
            return list(encoding.ids)
        return self._encode_marked(rendered, encoding, marker)

    def spelling(self, token_id: int) -> str:
        """The vocabulary's own spelling; empty for an id of the target that the tokenizer does not know."""
        known = token_id < self.vocab_size
        return (self._spellings[token_id] or "") if known else ""

    def shown_text(self, token_id: int) -> str:
        """A token alone, for people: of parts of a character U+FFFD, of special tokens their spelling."""
        if self._byte_level and token_id < self.vocab_size:
            return self._bytes[token_id].decode("utf-8", "replace")
        return self.spelling(token_id).replace("▁", " ")

    def has_text(self, token_id: int) -> bool:
        """Whether decoding shows the token: not a special one, and one that the tokenizer knows."""
        return token_id < self.vocab_size and token_id not in self._hidden_ids and self._spellings[token_id] is not None

    def detokenizer(self) -> Detokenizer:
        """A detokenizer for one generation; push only ids that have text."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._bytes.__getitem__)
        return GeneralDetokenizer(self._tokenizer.decode, self._fallback_byte)

    def _fallback_byte(self, token_id: int) -> int | None:
        match = _FALLBACK_BYTE.fullmatch(self.spelling(token_id))
        return int(match[1], 16) if match else None

    def _encode_with_special(self, text: str) -> Any:
        # encode() would hold the GIL, encode_batch() does not.
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def _shield(self, content: str, marker: "_Marker") -> str:
        """The content with every spelling of a special token replaced by a marker."""
        encoding = self._encode_with_special(content)
        parts, end = [], 0
        if not self._special_ids.isdisjoint(encoding.ids):
            for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
                if token_id in self._special_ids:
                    parts += [content[end:start], marker.put(content[start:stop])]
                    end = stop
        shielded = "".join([*parts, content[end:]])
        # The template's text next to the content may complete a special token: an empty marker keeps them apart. It
        # goes inside the white space, which templates trim.
        core = shielded.strip()
        inside = any(core in s for s in self._special_strings) and bool(core)
        before = marker.put("") if inside or core.startswith(self._endings) else ""
        after = marker.put("") if core.endswith(self._beginnings) else ""
        start = len(shielded) - len(shielded.lstrip())
        return shielded[:start] + before + core + after + shielded[start + len(core) :]

    def _encode_marked(self, rendered: str, encoding: Any, marker: "_Marker") -> list[int]:
        ids: list[int] = []
        stretch: list[int] = []
        start = 0

        def close_stretch(end: int) -> None:
            text = rendered[start:end]
            ids.extend(self.encode(marker.restore(text)) if marker.is_in(text) else stretch)
            stretch.clear()

        for token_id, (token_start, token_end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._special_ids:
                close_stretch(token_start)
                ids.append(token_id)
                start = token_end
            else:
                stretch.append(token_id)
        close_stretch(len(rendered))
        return ids


class _Marker:
    """Stands for pieces of text while a template is rendered. A random word that no text can hold by design or by
    chance makes it recognisable."""

    def __init__(self) -> None:
        self._word = f"\U000f0000{secrets.token_hex(8)}"
        self._pattern = re.compile(f"{self._word}:([0-9]+)\U000f0000")
        self._originals: list[str] = []

    @property
    def used(self) -> bool:
        return bool(self._originals)

    def put(self, original: str) -> str:
        self._originals.append(original)
        return f"{self._word}:{len(self._originals) - 1}\U000f0000"

    def is_in(self, text: str) -> bool:
        return self._word in text

    def restore(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._originals[int(match[1])], text)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether tokens decode to bytes that join to UTF-8."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {"type": None}
    kinds = [d["type"] for d in decoder.get("decoders", [decoder])]
    if "ByteLevel" in kinds and len(kinds) > 1:
        raise StartupError(f"tokenizer.json: a ByteLevel decoder together with others ({kinds}) is not supported")
    return kinds == ["ByteLevel"]
