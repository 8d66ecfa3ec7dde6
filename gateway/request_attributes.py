"""What a generation's span says of it, by OpenTelemetry's conventions for generative AI: no text, no token ids."""

from typing import Any

from gateway.generation import GenerationEnd
from tandem.speculation_modes import mode_name
from tandem.v1 import generation_pb2


def request_attributes(operation: str, model: str, request: generation_pb2.GenerateRequest) -> dict[str, Any]:
    """Of a request as it came: what it does not set is not there."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": model,
        "tandem.speculation_mode": mode_name(request.speculation_mode),
    }
    for field in ("temperature", "top_p", "top_k"):
        if request.sampling.HasField(field):
            attributes[f"gen_ai.request.{field}"] = getattr(request.sampling, field)
    if request.stopping.HasField("max_tokens"):
        attributes["gen_ai.request.max_tokens"] = request.stopping.max_tokens
    return attributes


def end_attributes(end: GenerationEnd) -> dict[str, Any]:
    """Of a generation that ended normally."""
    counts = end.counts
    return {
        "gen_ai.usage.input_tokens": end.prompt_tokens,
        "gen_ai.usage.output_tokens": end.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": end.cached_prompt_tokens,
        "gen_ai.response.finish_reasons": ["stop" if end.ending.stopped else "length"],
        "gen_ai.response.time_to_first_chunk": end.time_to_first_token_seconds,
        "tandem.steps": counts.steps,
        "tandem.drafts": counts.drafts,
        "tandem.drafted_tokens": counts.drafted_tokens,
        "tandem.accepted_tokens": counts.accepted_tokens,
    }
