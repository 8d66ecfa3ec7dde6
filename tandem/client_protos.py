"""The Python client's values to protos and back."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc

from tandem.client_types import (
    Chunk,
    Final,
    GenerateOptions,
    GenerationError,
    Message,
    ModelInfo,
    Prompt,
    Session,
)
from tandem.rpc import field_violations, retry_after_seconds
from tandem.speculation_modes import MODE_NUMBERS, mode_name
from tandem.step_timing import StepTiming
from tandem.v1 import generation_pb2


def error_of(error: grpc.RpcError) -> GenerationError:
    """From a gRPC error of either client."""
    code, details = error.code().name, error.details() or ""
    return GenerationError(code, details, field_violations(error), retry_after_seconds(error))


class _Fields:
    """Converts arguments to what protobuf takes, and collects what it would refuse with a message of its own."""

    def __init__(self) -> None:
        self.violations: list[tuple[str, str]] = []

    def unsigned(self, field: str, value: Any, bits: int) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            self.violations.append((field, f"must be an integer, is {value!r}"))
            return 0
        if not 0 <= number < 1 << bits:
            self.violations.append((field, f"must be in [0, 2^{bits}), is {number}"))
            return 0
        return number

    def unsigned_list(self, field: str, values: Iterable[Any]) -> list[int]:
        return [self.unsigned(f"{field}[{index}]", value, 32) for index, value in enumerate(values)]

    def number(self, field: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            self.violations.append((field, f"must be a number, is {value!r}"))
            return 0.0

    def text(self, field: str, value: Any) -> str:
        if not isinstance(value, str):
            self.violations.append((field, f"must be a string, is {type(value).__name__}"))
            return ""
        try:
            value.encode()
        except UnicodeEncodeError as error:
            self.violations.append((field, f"is not Unicode text: lone surrogate at index {error.start}"))
            return ""
        return value

    def flags(self, flags: Mapping[Any, Any]) -> dict[str, bool]:
        for name, value in flags.items():
            if not isinstance(value, bool):
                self.violations.append(("template_flags", f"{name!r} must be a bool, is {value!r}"))
        return {self.text("template_flags", name): value is True for name, value in flags.items()}

    def messages(self, messages: Iterable[Any]) -> list[generation_pb2.ChatMessage]:
        found = []
        for index, message in enumerate(messages):
            if not isinstance(message, Message):
                self.violations.append((f"messages[{index}]", f"must be a Message, is {type(message).__name__}"))
                continue
            role = self.text(f"messages[{index}].role", message.role)
            content = self.text(f"messages[{index}].content", message.content)
            found.append(generation_pb2.ChatMessage(role=role, content=content))
        return found

    def check(self) -> None:
        if self.violations:
            reasons = "; ".join(f"{field}: {reason}" for field, reason in self.violations)
            raise GenerationError("INVALID_ARGUMENT", reasons, self.violations)


def generate_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """The proto of a Generate call; GenerationError naming every argument that it cannot hold."""
    if unknown := options.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}")
    fields = _Fields()
    request = generation_pb2.GenerateRequest(
        return_step_timing=options.get("step_timing", False), return_log_probs=options.get("log_probs", False)
    )
    _set_prompt(fields, request, prompt)
    request.template_flags.update(fields.flags(options.get("template_flags", {})))
    if (session_id := options.get("session_id")) is not None:
        request.session_id = fields.text("session_id", session_id)
    _set_sampling(fields, request.sampling, options)
    _set_stopping(fields, request.stopping, options)
    mode = options.get("speculation_mode", "default")
    if mode in MODE_NUMBERS:
        request.speculation_mode = MODE_NUMBERS[mode]
    else:
        fields.violations.append(("speculation_mode", f"must be one of {', '.join(MODE_NUMBERS)}, is {mode!r}"))
    if (max_draft_nodes := options.get("max_draft_nodes")) is not None:
        request.max_draft_nodes = fields.unsigned("max_draft_nodes", max_draft_nodes, 32)
    fields.check()
    return request


def tokenize_request(
    prompt: str | Sequence[Message], template_flags: Mapping[str, bool]
) -> generation_pb2.TokenizeRequest:
    """The proto of a Tokenize call."""
    fields = _Fields()
    request = generation_pb2.TokenizeRequest()
    if isinstance(prompt, str):
        request.prompt = fields.text("prompt", prompt)
    else:
        request.messages.extend(fields.messages(prompt))
    request.template_flags.update(fields.flags(template_flags))
    fields.check()
    return request


def open_session_request(messages: Sequence[Message], ttl_seconds: int | None) -> generation_pb2.OpenSessionRequest:
    """The proto of an OpenSession call."""
    fields = _Fields()
    request = generation_pb2.OpenSessionRequest(messages=fields.messages(messages))
    if ttl_seconds is not None:
        request.ttl_seconds = fields.unsigned("ttl_seconds", ttl_seconds, 32)
    fields.check()
    return request


def _set_prompt(fields: _Fields, request: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.prompt = fields.text("prompt", prompt)
    elif any(isinstance(item, Message) for item in prompt):
        request.messages.extend(fields.messages(prompt))
    else:
        request.token_ids.extend(fields.unsigned_list("token_ids", prompt))


def _set_sampling(fields: _Fields, sampling: generation_pb2.SamplingParams, options: GenerateOptions) -> None:
    if (temperature := options.get("temperature")) is not None:
        sampling.temperature = fields.number("sampling.temperature", temperature)
    if (top_p := options.get("top_p")) is not None:
        sampling.top_p = fields.number("sampling.top_p", top_p)
    if (top_k := options.get("top_k")) is not None:
        sampling.top_k = fields.unsigned("sampling.top_k", top_k, 32)
    if (min_p := options.get("min_p")) is not None:
        sampling.min_p = fields.number("sampling.min_p", min_p)
    if (seed := options.get("seed")) is not None:
        sampling.seed = fields.unsigned("sampling.seed", seed, 64)


def _set_stopping(fields: _Fields, stopping: generation_pb2.StoppingParams, options: GenerateOptions) -> None:
    if (max_tokens := options.get("max_tokens")) is not None:
        stopping.max_tokens = fields.unsigned("stopping.max_tokens", max_tokens, 32)
    stopping.stop_token_ids.extend(fields.unsigned_list("stopping.stop_token_ids", options.get("stop_token_ids", ())))
    stop = options.get("stop") or ()
    stop_strings = [stop] if isinstance(stop, str) else stop
    stopping.stop_strings.extend(fields.text(f"stopping.stop_strings[{i}]", s) for i, s in enumerate(stop_strings))
    if (ignore_eos := options.get("ignore_eos")) is not None:
        stopping.ignore_eos = ignore_eos


def chunk_of(response: generation_pb2.GenerateResponse) -> Chunk:
    """What a response streamed."""
    timing = None
    if response.HasField("step_timing"):
        timing = StepTiming.from_proto(response.step_timing)
    return Chunk(response.text, list(response.token_ids), list(response.log_probs), timing)


def final_of(final: generation_pb2.GenerationFinal) -> Final:
    """How it ended."""
    usage, speculation = final.usage, final.speculation
    return Final(
        finish_reason="stop" if final.finish_reason == generation_pb2.FINISH_REASON_STOP else "length",
        stop_token_id=final.stop_token_id if final.HasField("stop_token_id") else None,
        stop_string=final.stop_string if final.HasField("stop_string") else None,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        steps=speculation.steps,
        drafts=speculation.drafts,
        drafted_tokens=speculation.drafted_tokens,
        accepted_tokens=speculation.accepted_tokens,
        accepted_per_position=list(speculation.accepted_per_position),
        seed=final.seed,
        time_to_first_token_seconds=final.time_to_first_token_seconds,
        total_seconds=final.total_seconds,
    )


def session_of(response: generation_pb2.GetSessionResponse) -> Session:
    """A session's state."""
    messages = [Message(message.role, message.content) for message in response.messages]
    return Session(response.session_id, messages, response.expires_at, response.busy)


def model_of(response: generation_pb2.GetModelResponse) -> ModelInfo:
    """The served target."""
    sampling = response.default_sampling
    return ModelInfo(
        model=response.model,
        max_context=response.max_context,
        vocab_size=response.vocab_size,
        eos_token_ids=list(response.eos_token_ids),
        speculation_modes=[mode_name(mode) for mode in response.speculation_modes],
        default_speculation_mode=mode_name(response.default_speculation_mode),
        max_draft_nodes=response.max_draft_nodes,
        drafters=response.drafters,
        version=response.version,
        default_temperature=sampling.temperature,
        default_top_p=sampling.top_p,
        default_top_k=sampling.top_k,
        default_min_p=sampling.min_p,
    )
