"""The prompt set that ships with Tandem: self-written conversations for measurements, equal parts chat, code, maths."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

Kind = Literal["chat", "code", "maths"]
KINDS: tuple[Kind, ...] = ("chat", "code", "maths")


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation; role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a user's turn."""

    id: str
    kind: Kind
    messages: tuple[Turn, ...]


@cache
def load_prompts() -> tuple[Prompt, ...]:
    """All prompts, in the order of the file: chat, code, maths, 16 each."""
    lines = resources.files("tandem").joinpath("prompts.jsonl").read_text().splitlines()
    return tuple(_prompt(json.loads(line)) for line in lines)


def mixed_prompts(count: int, kinds: Sequence[Kind] = KINDS) -> list[Prompt]:
    """`count` prompts of these kinds, which take turns (chat, code, maths, chat, ...), starting over after the last."""
    by_kind = [[prompt for prompt in load_prompts() if prompt.kind == kind] for kind in kinds]
    in_turn = [prompt for row in zip(*by_kind, strict=True) for prompt in row]
    return [in_turn[index % len(in_turn)] for index in range(count)]


def _prompt(data: dict[str, Any]) -> Prompt:
    return Prompt(data["id"], data["kind"], tuple(Turn(m["role"], m["content"]) for m in data["messages"]))
