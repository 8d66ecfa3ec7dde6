"""The JSON files of the target's folder that the gateway reads. StartupError names the file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoints.model_json import read_json
from tandem.errors import StartupError
from tandem.sampling import SamplingParams


@dataclass(frozen=True)
class ChatTemplateSource:
    """A chat template and the special tokens it may name as variables (bos_token, eos_token ...)."""

    source: str
    variables: dict[str, Any]


def read_chat_template(folder: Path) -> ChatTemplateSource | None:
    """From chat_template.jinja, or else tokenizer_config.json (the one named "default" if it holds several)."""
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(config_path) if config_path.is_file() else {}
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if template_path.is_file():
        template = template_path.read_text(encoding="utf-8")
    if template is None:
        return None
    if not isinstance(template, str):
        raise StartupError(f"{config_path}: chat_template must be a string or a list of named strings")
    return ChatTemplateSource(template, _special_tokens(config))


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    tokens: dict[str, Any] = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def read_default_sampling(folder: Path) -> SamplingParams:
    """What generation_config.json says, as transformers reads it: without `do_sample: true` the most likely token is
    taken. Filters it does not name are off (transformers' own default, top_k 50, is not assumed)."""
    path = folder / "generation_config.json"
    config = read_json(path) if path.is_file() else {}

    def number(key: str, default: float) -> float:
        value = config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise StartupError(f"{path}: {key} must be a number, is {value!r}")
        return value

    sampling = SamplingParams(
        temperature=number("temperature", 1.0) if config.get("do_sample") else 0.0,
        top_p=number("top_p", 1.0),
        top_k=int(number("top_k", 0)),
        min_p=number("min_p", 0.0),
    )
    for violation in sampling.violations(prefix=""):
        raise StartupError(f"{path}: {violation.field}: {violation.reason}")
    return sampling


def read_media_token_ids(folder: Path) -> frozenset[int]:
    """Ids that stand for an image or video in a multimodal model's prompt."""
    config = read_json(folder / "config.json")
    found = (config.get(key) for key in ("media_placeholder_token_id", "image_token_id", "video_token_id"))
    return frozenset(id for id in found if isinstance(id, int))
