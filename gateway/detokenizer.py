"""Text from token ids, one id at a time, equal to decoding all of them at once.

A token may hold part of a character, so a detokenizer keeps back what it cannot decide yet. Per id it returns two
pieces: text that was undecided and turns out to belong to earlier ids, and text that belongs to this id. Whatever the
tokenizer, the pieces joined equal `Tokenizer.decode(ids, skip_special_tokens=True)`.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

BYTE_RUN_LIMIT = 32
"""Byte-fallback tokens kept back at most."""

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """State of one generation. Special tokens and ids without a spelling have no text and are not pushed."""

    def push(self, token_id: int) -> tuple[str, str]:
        """(text of earlier ids, text of this id) that became known."""

    def finish(self) -> str:
        """What was kept back, as text of earlier ids; the state is then as new."""


class ByteLevelDetokenizer:
    """For byte-level BPE: every token is a byte string, their join is UTF-8, invalid parts become U+FFFD.

    Keeps back at most the three bytes of a character's beginning.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> tuple[str, str]:
        data = self._token_bytes(token_id)
        if not data or not self._decoder.getstate()[0]:
            return "", self._decoder.decode(data)
        first = self._decoder.decode(data[:1])
        # The kept bytes either go on (nothing, or one character that ends in a continuation byte), or they were
        # invalid: then U+FFFD for them comes first, and what the new byte means after it.
        goes_on = not first or (len(first) == 1 and 0x80 <= data[0] < 0xC0)
        late, own = ("", first) if goes_on else (first[0], first[1:])
        return late, own + self._decoder.decode(data[1:])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class GeneralDetokenizer:
    """For any other tokenizer whose decoder looks back one token at most (Metaspace, WordPiece, SentencePiece BPE).

    A token's text is what it adds behind its predecessor. Byte-fallback tokens (`<0x0A>`) are decoded in runs, as the
    `tokenizers` library does: a run that is not UTF-8 becomes one U+FFFD per byte, wherever the fault lies. So a run is
    kept back until it ends, or until it is BYTE_RUN_LIMIT bytes long: only for a longer run that turns invalid later
    does the text differ from decoding all ids at once.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], fallback_byte: Callable[[int], int | None]):
        self._decode = decode
        self._fallback_byte = fallback_byte
        self._previous: int | None = None
        self._run: list[int] = []
        self._run_opens_text = False

    def push(self, token_id: int) -> tuple[str, str]:
        if self._fallback_byte(token_id) is not None:
            late = self._take_valid_part() if len(self._run) >= BYTE_RUN_LIMIT else ""
            self._run_opens_text |= self._previous is None
            self._run.append(token_id)
            self._previous = token_id
            return late, ""
        late = self.finish()
        before = [] if self._previous is None else [self._previous]
        own = self._decode([*before, token_id])[len(self._decode(before)) :]
        self._previous = token_id
        return late, own

    def finish(self) -> str:
        return self._take(len(self._run))

    def _take_valid_part(self) -> str:
        try:
            self._bytes(self._run).decode()
        except UnicodeDecodeError as error:
            return self._take(error.start or len(self._run))
        return self._take(len(self._run))

    def _take(self, count: int) -> str:
        taken, self._run = self._run[:count], self._run[count:]
        opens_text, self._run_opens_text = self._run_opens_text, False
        if opens_text:
            # Only here: decoders treat the first token of a text apart (many strip its space).
            return self._decode(taken)
        try:
            return self._bytes(taken).decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(taken)

    def _bytes(self, token_ids: list[int]) -> bytes:
        return bytes(byte for token_id in token_ids if (byte := self._fallback_byte(token_id)) is not None)
