"""What the JSON files of a model folder say. Needs no torch. StartupError names the file."""

import json
from pathlib import Path
from typing import Any

from tandem.errors import StartupError


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model."""
    nested: dict[str, Any] = config.get("text_config") or config
    return nested


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise StartupError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise StartupError(f"{path}: must hold a JSON object")
    return data


def eos_token_ids(target: Path) -> list[int]:
    """End-of-sequence ids: config.json's, its text_config's and generation_config.json's, united."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (target / name).is_file():
            config = read_json(target / name)
            for value in (config.get("eos_token_id"), text_config(config).get("eos_token_id")):
                found |= set(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)


def read_vocab_size(target: Path) -> int:
    """The target's number of ids, from config.json; of a multimodal model its text part's."""
    path = target / "config.json"
    size = text_config(read_json(path)).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise StartupError(f"{path}: vocab_size must be a positive integer, is {size!r}")
    return size
