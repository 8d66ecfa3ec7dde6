"""What the Python client takes and gives, as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from tandem.step_timing import StepTiming

SpeculationMode = Literal["default", "off", "block", "tree", "auto"]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """"system", "user" or "assistant"."""
    content: str


Prompt = str | Sequence[int] | Sequence[Message]
"""Raw text, token ids, or a conversation."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`. What is left out or None takes the server's default, as `model()` tells it."""

    temperature: float | None
    """0 takes the most likely token."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    """Unset: the gateway draws one; `Final.seed` tells which."""
    max_tokens: int | None
    stop: str | Sequence[str]
    """Strings that end the generation, cut from its text."""
    stop_token_ids: Sequence[int]
    """Ids that end it."""
    ignore_eos: bool | None
    """Go on past the target's end-of-sequence tokens."""
    speculation_mode: SpeculationMode
    """How drafts are used: "off" decodes plainly, "block" verifies chains, "tree" trees, "auto" picks what pays most at
    each step. The text is the same."""
    max_draft_nodes: int | None
    """Draft tokens verified per step at most, from 1 to `ModelInfo.max_draft_nodes`."""
    session_id: str | None
    """Add the prompt, which must be Messages, to a session."""
    template_flags: Mapping[str, bool]
    """Variables for the chat template, such as {"thinking": False}; only those that the target's template reads."""
    step_timing: bool
    """Fill `Chunk.step_timing`."""
    log_probs: bool
    """Fill `Chunk.log_probs`."""


@dataclass(frozen=True)
class Chunk:
    """One piece of a generation. Text never splits a character and may be empty."""

    text: str
    token_ids: list[int]
    log_probs: list[float]
    """One per token id if asked for, else empty."""
    step_timing: StepTiming | None


@dataclass(frozen=True)
class Final:
    """How a generation ended."""

    finish_reason: Literal["stop", "length"]
    stop_token_id: int | None
    """The token that ended it, if one did."""
    stop_string: str | None
    """The stop string that ended it, if one did."""
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    steps: int
    """Decode steps of the target, the prompt's own step apart."""
    drafts: int
    """Of those, steps that verified a draft."""
    drafted_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    """Entry k: how often the draft token at depth k + 1 was accepted."""
    seed: int
    """The seed that was used; the same request with it gives the same text."""
    time_to_first_token_seconds: float
    total_seconds: float

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per step that verified a draft; None without such steps."""
        return (self.drafts + self.accepted_tokens) / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens per drafted one; None if none were drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


@dataclass(frozen=True)
class Session:
    """A conversation that the gateway keeps."""

    session_id: str
    messages: list[Message]
    expires_at: float
    """Unix seconds, if it is not used."""
    busy: bool
    """Whether a generation runs in it."""


@dataclass(frozen=True)
class ModelInfo:
    """The served target."""

    model: str
    max_context: int
    """Tokens of prompt and completion together, at most."""
    vocab_size: int
    eos_token_ids: list[int]
    speculation_modes: list[str]
    default_speculation_mode: str
    max_draft_nodes: int
    """Draft tokens a step verifies per request at most; 0 without speculation."""
    drafters: int
    """Drafters connected at this moment."""
    version: str
    default_temperature: float
    default_top_p: float
    default_top_k: int
    default_min_p: float


class GenerationError(Exception):
    """A call that failed, on the server or because its arguments cannot be sent."""

    def __init__(
        self,
        code: str,
        message: str,
        violations: Sequence[tuple[str, str]] = (),
        retry_after_seconds: float | None = None,
    ):
        super().__init__(f"{code}: {message}")
        self.code = code
        """Name of the gRPC status, such as "INVALID_ARGUMENT"."""
        self.message = message
        self.violations = list(violations)
        """(field, reason) of every wrong field, for INVALID_ARGUMENT."""
        self.retry_after_seconds = retry_after_seconds
        """When to try again, if the server said so."""
