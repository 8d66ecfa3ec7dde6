"""What a client gets to see of the ids the verifier emits: text, ids and log-probabilities, released together.

Ids are read one by one, so the result is the same however the verifier grouped them, and the earliest event ends the
generation: a stop string, a stop token or max_tokens; a stop string that is completed by the very token that is also
the last allowed one wins.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.detokenizer import Detokenizer
from gateway.stop_strings import StopStringMatcher


@dataclass(frozen=True)
class Piece:
    """What is released at once. Pieces joined are the whole output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids)

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(self.text + other.text, self.token_ids + other.token_ids, self.log_probs + other.log_probs)


@dataclass(frozen=True)
class Ending:
    """Why an output ended: stopped by a token or by a string, or else by its length."""

    stop_token_id: int | None = None
    stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_token_id is not None or self.stop_string is not None


@dataclass
class _Token:
    """A token not yet released."""

    token_id: int
    log_prob: float | None
    has_text: bool
    """Whether it is decoded at all: special tokens and the stop token are not."""
    text_end: int
    """Characters of the output up to and including this token's."""


class Output:
    """One generation's output, from the verifier's ids to pieces for the client.

    With stop strings, text that may begin one is kept back, and so is every id not needed for the text released so far:
    a token is needed if it holds a part of a released character. Without stop strings ids are released at once.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        has_text: Callable[[int], bool],
        stop_strings: Sequence[str],
        stop_token_ids: frozenset[int],
        max_tokens: int,
    ):
        self._detokenizer = detokenizer
        self._has_text = has_text
        self._matcher = StopStringMatcher(stop_strings)
        self._keeps_back = bool(stop_strings)
        self._stop_token_ids = stop_token_ids
        self._remaining = max_tokens
        self._held: deque[_Token] = deque()
        self._text = ""
        """Decoded, not yet released."""
        self._released = 0
        self._token_end = 0
        """text_end of the last released token."""
        self.ending: Ending | None = None
        """Set once the output has ended; ids after that are ignored."""
        self.completion_tokens = 0
        """Ids released so far."""

    def push(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> Piece:
        """Take ids (and one log-probability each, or none at all); returns what can be released."""
        for index, token_id in enumerate(token_ids):
            if self.ending is None:
                self._take(token_id, log_probs[index] if log_probs else None)
        return self._release()

    def end(self, ending: Ending) -> Piece:
        """End an output that has not ended by itself; returns all that was kept back."""
        self._flush()
        self.ending = self.ending or ending
        return self._release()

    def _take(self, token_id: int, log_prob: float | None) -> None:
        stops = token_id in self._stop_token_ids
        has_text = not stops and self._has_text(token_id)
        own = ""
        if has_text:
            late, own = self._detokenizer.push(token_id)
            self._add_late_text(late)
        elif stops:
            self._flush()
        if self.ending is not None:
            return
        self._read(own)
        self._held.append(_Token(token_id, log_prob, has_text, self._text_end))
        self._remaining -= 1
        if self.ending is None and stops:
            self.ending = Ending(stop_token_id=token_id)
        elif self.ending is None and self._remaining == 0:
            self._flush()
            self.ending = self.ending or Ending()

    def _flush(self) -> None:
        self._add_late_text(self._detokenizer.finish())

    def _add_late_text(self, text: str) -> None:
        """Add text that belongs to the last taken token that has any."""
        if not text:
            return
        self._read(text)
        for token in reversed(self._held):
            token.text_end = self._text_end
            if token.has_text:
                return
        self._token_end = self._text_end

    def _read(self, text: str) -> None:
        match = self._matcher.feed(text)
        if match is None:
            self._text += text
            return
        self._text = (self._text + text[: match.end])[: -len(match.stop_string)]
        self.ending = Ending(stop_string=match.stop_string)

    @property
    def _text_end(self) -> int:
        return self._released + len(self._text)

    def _release(self) -> Piece:
        cut = self.ending is not None and self.ending.stop_string is not None
        safe = len(self._text) - (0 if self.ending else self._matcher.held)
        text, self._text = self._text[:safe], self._text[safe:]
        self._released += safe
        only_needed = cut or (self._keeps_back and not self.ending)
        released = []
        while self._held and (not only_needed or self._token_end < self._released):
            released.append(self._held.popleft())
            self._token_end = released[-1].text_end
        if cut:
            self._held.clear()
        self.completion_tokens += len(released)
        log_probs = [token.log_prob for token in released if token.log_prob is not None]
        return Piece(text, [token.token_id for token in released], log_probs)
