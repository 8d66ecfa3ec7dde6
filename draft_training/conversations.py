"""Training data: conversations whose answers the target wrote, kept in shards of JSON lines.

A shard is `NAME.jsonl.gz`; beside it may lie `NAME.taps`, the target's hidden states for the same tokens
(draft_training.taps). A shard appears under its name when it is complete, so a run that was cut off leaves no half one.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.errors import StartupError

SUFFIX = ".jsonl.gz"


@dataclass(frozen=True)
class Conversation:
    """A prompt and the target's answer, as the target's token ids."""

    ids: list[int]
    answer_start: int
    """Index of the answer's first token."""
    greedy: bool
    """Answered at temperature 0."""
    kind: str
    """Kind of prompt, as the configuration names it; "" if unknown."""

    @property
    def answer_tokens(self) -> int:
        return len(self.ids) - self.answer_start


def shard_files(folder: Path) -> list[Path]:
    """Complete shards, in name order."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def read_shard(path: Path) -> list[Conversation]:
    """StartupError naming file and line if it cannot be read."""
    conversations = []
    try:
        with gzip.open(path, "rt") as lines:
            for number, line in enumerate(lines, 1):
                record = json.loads(line)
                record.setdefault("kind", "")
                try:
                    conversation = Conversation(**record)
                except TypeError as error:
                    raise StartupError(f"{path}: line {number}: {error}") from None
                if not 0 < conversation.answer_start < len(conversation.ids):
                    raise StartupError(f"{path}: line {number}: answer_start is outside ids")
                conversations.append(conversation)
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: {error}") from None
    return conversations


def write_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write a shard whole."""
    unfinished = path.with_name(path.name + ".part")
    with gzip.open(unfinished, "wt") as lines:
        for conversation in conversations:
            lines.write(json.dumps(asdict(conversation), separators=(",", ":")) + "\n")
    unfinished.rename(path)


class Duplicates:
    """Which prompts were seen."""

    def __init__(self, conversations: Iterable[Conversation] = ()):
        self._seen = {_prompt(c) for c in conversations}

    def add(self, conversation: Conversation) -> bool:
        """True if its prompt is new."""
        prompt = _prompt(conversation)
        if prompt in self._seen:
            return False
        self._seen.add(prompt)
        return True

    def has(self, prompt: Sequence[int]) -> bool:
        """Whether these ids are a prompt that was seen."""
        return tuple(prompt) in self._seen


def _prompt(conversation: Conversation) -> tuple[int, ...]:
    return tuple(conversation.ids[: conversation.answer_start])


def frequent_tokens(conversations: Iterable[Conversation], count: int) -> list[int]:
    """The `count` most frequent answer tokens, ascending; low ids fill up if there are fewer."""
    seen: Counter[int] = Counter()
    for conversation in conversations:
        seen.update(conversation.ids[conversation.answer_start :])
    tokens = {token for token, _ in seen.most_common(count)}
    spare = (token for token in range(2 * count) if token not in tokens)
    while len(tokens) < count:
        tokens.add(next(spare))
    return sorted(tokens)


def read_folder(folder: Path) -> Iterator[tuple[Path, list[Conversation]]]:
    """All shards."""
    for path in shard_files(folder):
        yield path, read_shard(path)
