"""Prompts for the target to answer: from files, or begun here and gone on with by the target itself.

A target that was trained on conversations writes a user's turn when it is given everything up to where one begins, so
no prompt collection is needed. The first words of a turn set its kind.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from draft_training.config import DataConfig
from gateway.chat_template import Turn
from gateway.tokenizer import TargetTokenizer
from tandem.errors import InvalidRequest, StartupError


@dataclass(frozen=True)
class Prompt:
    """How a conversation begins."""

    kind: str
    ids: list[int]
    """Up to where the answer begins, or up to where the target is to go on with the user's turn."""
    closing: list[int] | None
    """What ends a user's turn that the target goes on with, and opens the answer; None if `ids` is all of it."""
    greedy: bool
    shared: int = 0
    """How many of the first ids other prompts begin with too; fewer than all."""


def read_prompts(path: Path, tokenizer: TargetTokenizer) -> Iterator[tuple[str, list[int]]]:
    """(kind, ids up to where the answer begins) of a file of prompts; StartupError naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "messages" in record:
                ids = tokenizer.encode_chat([Turn(m["role"], m["content"]) for m in record["messages"]])
            else:
                ids = tokenizer.encode(record["prompt"])
        except (ValueError, TypeError, KeyError) as error:
            raise StartupError(f"{path}: line {number}: needs messages or a prompt: {error!r}") from None
        except InvalidRequest as error:
            raise StartupError(f"{path}: line {number}: {error}") from None
        if ids:
            yield str(record.get("kind", "")), ids


def prompts_from_files(config: DataConfig, tokenizer: TargetTokenizer, writer: int) -> Iterator[Prompt]:
    """Every prompt of the files once, in an order that the seed sets; each writer takes its share."""
    chance = random.Random(config.seed)
    found = [prompt for path in config.prompts for prompt in read_prompts(path, tokenizer)]
    chance.shuffle(found)
    for index, (kind, ids) in enumerate(found):
        greedy = chance.random() < config.greedy_share
        if index % config.writers == writer and len(ids) <= config.max_prompt_tokens:
            yield Prompt(kind, ids, None, greedy)


def written_prompts(config: DataConfig, tokenizer: TargetTokenizer, chance: random.Random) -> Iterator[Prompt]:
    """Openings without end, for the target to go on with; those that leave it no room are left out. StartupError for
    a system prompt that leaves room for none."""
    kinds = list(config.kinds)
    shares = [config.kinds[kind].share for kind in kinds]
    turns = {system: open_turn(tokenizer, system) for system in (None, *config.system_prompts)}
    shortest = min(len(tokenizer.encode(o)) for kind in config.kinds.values() for o in kind.openings)
    for system, (before, closing) in turns.items():
        if len(before) + shortest + len(closing) >= config.max_prompt_tokens:
            where = f"after the system prompt {system!r}" if system else "in the chat template"
            raise StartupError(f"data.max_prompt_tokens: {config.max_prompt_tokens} leaves a user no room {where}")
    while True:
        kind = chance.choices(kinds, shares)[0]
        with_system = bool(config.system_prompts) and chance.random() < config.system_share
        before, closing = turns[chance.choice(config.system_prompts) if with_system else None]
        opening = tokenizer.encode(chance.choice(config.kinds[kind].openings))
        greedy = chance.random() < config.greedy_share
        if len(before) + len(opening) + len(closing) < config.max_prompt_tokens:
            yield Prompt(kind, before + opening, closing, greedy, shared=len(before) - 1)


def open_turn(tokenizer: TargetTokenizer, system: str | None) -> tuple[list[int], list[int]]:
    """(ids up to where a user's turn begins, ids from its end to where the answer begins), as the chat template has
    them: what two conversations with different single words have in common."""
    turns = [Turn("system", system)] if system else []
    one, other = (tokenizer.encode_chat([*turns, Turn("user", word)]) for word in ("x", "7"))
    before = _common(one, other)
    after = _common(reversed(one), reversed(other))
    if len(before) + len(after) >= min(len(one), len(other)):
        raise StartupError("the target's chat template drops the user's turn")
    return before, after[::-1]


def _common(one: Iterable[int], other: Iterable[int]) -> list[int]:
    common = []
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        common.append(a)
    return common
