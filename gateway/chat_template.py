"""Rendering a conversation with the target's chat template, in a sandbox, as transformers renders it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.target_files import ChatTemplateSource
from tandem.errors import StartupError, invalid

Flags = Mapping[str, bool]
"""Variables of a chat template that a request sets, such as Kimi's `thinking`. Only booleans: a string could spell a
special token."""

NO_FLAGS: Flags = {}

_GIVEN: dict[str, Any] = {"messages": [], "tools": None, "documents": None, "add_generation_prompt": True}
"""What every template gets; a request gives the messages."""


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation."""

    role: str
    content: str


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, template: ChatTemplateSource):
        """StartupError if the template cannot be compiled."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            read = meta.find_undeclared_variables(environment.parse(template.source))
            self._template = environment.from_string(template.source)
        except jinja2.TemplateError as error:
            raise StartupError(f"chat_template: cannot be compiled: {error}") from None
        self._variables = template.variables
        self.flags = frozenset(read - environment.globals.keys() - template.variables.keys() - _GIVEN.keys())
        """Variables that the template reads and that only a request can set."""

    def render(self, turns: Sequence[Turn], flags: Flags = NO_FLAGS) -> str:
        """The prompt up to where the assistant's answer begins; InvalidRequest if the template refuses the turns."""
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            return self._template.render({**flags, **_GIVEN, **self._variables, "messages": messages})
        except Exception as error:  # a template can fail in any way, and it fails because of these turns
            reason = " ".join(str(error).split())[:200]
            raise invalid("messages", f"the target's chat template refuses this conversation: {reason}") from None


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)
