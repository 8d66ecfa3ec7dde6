"""Checks of requests against the target's limits. Violations name the proto field and say what is allowed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.chat_template import Flags, Turn
from gateway.requests import GenerationRequest, StoppingChoice
from tandem.errors import FieldViolation, InvalidRequest, invalid
from tandem.sampling import SamplingParams

ROLES = ("system", "user", "assistant")
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_VIOLATIONS = 10
"""Violations reported at once: a status travels in HTTP/2 headers, which are limited."""


@dataclass(frozen=True)
class TargetInfo:
    """What the verifier says about the target."""

    model: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    speculation_modes: tuple[str, ...]
    default_speculation_mode: str
    max_draft_nodes: int
    """Draft tokens a step verifies per request at most; 0 without speculation."""
    shows_last_draft: bool
    """Whether the verifier tells the draft verified last."""


@dataclass(frozen=True)
class PromptRules:
    """What the target's files say about prompts."""

    template_flags: frozenset[str]
    """Variables of the chat template that a request may set."""
    media_ids: frozenset[int]
    """Ids that stand for an image or video, which cannot be sent."""


def check_request(request: GenerationRequest, sampling: SamplingParams, target: TargetInfo, rules: PromptRules) -> None:
    """All that can be checked before the prompt is encoded; `sampling` is the request's with defaults filled in."""
    _raise(
        *_check_input(request.prompt, request.messages, request.token_ids),
        *_check_template_flags(request.template_flags, rules, bool(request.messages)),
        *_check_session(request),
        *_check_token_ids("token_ids", request.token_ids, target.vocab_size),
        *_check_no_media(request.token_ids, rules),
        *sampling.violations(),
        *_check_stopping(request.stopping, target),
        *_check_speculation(request, target),
    )


def check_turns(turns: Sequence[Turn]) -> None:
    """The turns a session begins with."""
    _raise(*_check_roles(turns))


def check_tokenize(prompt: str | None, turns: Sequence[Turn], flags: Flags, rules: PromptRules) -> None:
    """The input of Tokenize: prompt or messages."""
    _raise(
        *_exactly_one({"prompt": prompt is not None, "messages": bool(turns)}),
        *_check_template_flags(flags, rules, bool(turns)),
        *_check_roles(turns),
    )


def check_lengths(field: str, prompt_tokens: int, stopping: StoppingChoice, default: int | None, context: int) -> int:
    """The number of tokens to emit at most, for an encoded prompt that came in `field`; at least one must fit."""
    room = context - prompt_tokens
    if prompt_tokens == 0:
        raise invalid(field, "must not be empty")
    if room < 1:
        raise prompt_too_long(field, prompt_tokens, context)
    if stopping.max_tokens is None:
        return room if default is None else min(room, default)
    if stopping.max_tokens > room:
        raise invalid(
            "stopping.max_tokens",
            f"must be at most {room}: the prompt has {prompt_tokens} tokens and the context holds {context}; "
            f"is {stopping.max_tokens}",
        )
    return stopping.max_tokens


def prompt_too_long(field: str, tokens: int | None, context: int) -> InvalidRequest:
    """For a prompt of `tokens` tokens, None if they were not all counted."""
    size = f"has {tokens} tokens" if tokens is not None else f"has more than {context} tokens"
    return invalid(field, f"{size}; the context holds {context}, so a prompt may have {context - 1}")


def _check_input(prompt: str | None, turns: Sequence[Turn], token_ids: Sequence[int]) -> Iterator[FieldViolation]:
    """Exactly one input, and not an empty one."""
    yield from _exactly_one({"prompt": prompt is not None, "messages": bool(turns), "token_ids": bool(token_ids)})
    if prompt == "":
        yield FieldViolation("prompt", "must not be empty")
    yield from _check_roles(turns)


def _exactly_one(inputs: dict[str, bool]) -> Iterator[FieldViolation]:
    names = list(inputs)
    given = [name for name in names if inputs[name]]
    one_of = f"exactly one of {', '.join(names[:-1])} and {names[-1]} must be set"
    if not given:
        yield FieldViolation(names[0], f"{one_of}; none is")
    for name in given[1:]:
        yield FieldViolation(name, f"{one_of}; {given[0]} is set too")


def _check_roles(turns: Sequence[Turn]) -> Iterator[FieldViolation]:
    for index, turn in enumerate(turns):
        if turn.role not in ROLES:
            yield FieldViolation(
                f"messages[{index}].role", f"must be one of {', '.join(ROLES)}, is {_quoted(turn.role)}"
            )


def _check_session(request: GenerationRequest) -> Iterator[FieldViolation]:
    if request.session_id is None:
        return
    for field, is_set in (("prompt", request.prompt is not None), ("token_ids", bool(request.token_ids))):
        if is_set:
            yield FieldViolation(field, "cannot be added to a session; use messages")


def _check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> Iterator[FieldViolation]:
    if max(token_ids, default=0) >= vocab_size:
        for index, token_id in enumerate(token_ids):
            if token_id >= vocab_size:
                yield FieldViolation(f"{field}[{index}]", f"must be below {vocab_size}, is {token_id}")


def _check_no_media(token_ids: Sequence[int], rules: PromptRules) -> Iterator[FieldViolation]:
    if rules.media_ids:
        for index, token_id in enumerate(token_ids):
            if token_id in rules.media_ids:
                yield FieldViolation(
                    f"token_ids[{index}]", f"{token_id} stands for an image or video; only text can be sent"
                )


def _check_template_flags(flags: Flags, rules: PromptRules, has_messages: bool) -> Iterator[FieldViolation]:
    """A flag that nothing reads would be ignored silently."""
    if flags and not has_messages:
        yield FieldViolation("template_flags", "is for messages, which the chat template renders")
        return
    known = ", ".join(sorted(rules.template_flags)) or "none"
    for name in flags:
        if name not in rules.template_flags:
            yield FieldViolation(
                "template_flags", f"the target's chat template does not read {_quoted(name)}; it reads: {known}"
            )


def _check_stopping(stopping: StoppingChoice, target: TargetInfo) -> Iterator[FieldViolation]:
    if stopping.max_tokens == 0:
        yield FieldViolation("stopping.max_tokens", "must be at least 1, is 0")
    strings, ids = stopping.stop_strings, stopping.stop_token_ids
    if len(strings) > MAX_STOP_STRINGS:
        yield FieldViolation("stopping.stop_strings", f"must be at most {MAX_STOP_STRINGS}, are {len(strings)}")
    for index, stop_string in enumerate(strings):
        if not 1 <= len(stop_string) <= MAX_STOP_STRING_CHARACTERS:
            yield FieldViolation(
                f"stopping.stop_strings[{index}]",
                f"must have 1 to {MAX_STOP_STRING_CHARACTERS} characters, has {len(stop_string)}",
            )
    if len(ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation("stopping.stop_token_ids", f"must be at most {MAX_STOP_TOKEN_IDS}, are {len(ids)}")
    yield from _check_token_ids("stopping.stop_token_ids", ids, target.vocab_size)


def _check_speculation(request: GenerationRequest, target: TargetInfo) -> Iterator[FieldViolation]:
    mode, nodes, limit = request.speculation_mode, request.max_draft_nodes, target.max_draft_nodes
    if mode not in ("default", *target.speculation_modes):
        allowed = ", ".join(("default", *target.speculation_modes))
        yield FieldViolation("speculation_mode", f"must be one of {allowed} on this server, is {mode}")
    if nodes is not None and limit == 0:
        yield FieldViolation("max_draft_nodes", f"must not be set: this server does not speculate; is {nodes}")
    elif nodes is not None and not 1 <= nodes <= limit:
        yield FieldViolation("max_draft_nodes", f"must be in [1, {limit}] on this server, is {nodes}")


def _raise(*violations: FieldViolation) -> None:
    if violations:
        raise InvalidRequest(*violations[:MAX_VIOLATIONS])


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
