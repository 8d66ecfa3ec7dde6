"""What clients ask for, as plain values. Fields that are None or empty were not set."""

from dataclasses import dataclass, field

from gateway.chat_template import Flags, Turn


@dataclass(frozen=True)
class SamplingChoice:
    """Sampling fields of a request; None means the target's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class StoppingChoice:
    """When a request wants to end."""

    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One Generate call."""

    prompt: str | None = None
    messages: tuple[Turn, ...] = ()
    token_ids: tuple[int, ...] = ()
    session_id: str | None = None
    sampling: SamplingChoice = SamplingChoice()
    stopping: StoppingChoice = StoppingChoice()
    speculation_mode: str = "default"
    """"default", "off", "block", "tree", "auto", or the number of a mode that this release does not know."""
    max_draft_nodes: int | None = None
    """Draft tokens verified per step at most; None is as many as the verifier allows."""
    log_probs: bool = False
    template_flags: Flags = field(default_factory=dict)

    @property
    def input_field(self) -> str:
        """The field that holds the prompt; meaningful once exactly one is set."""
        if self.prompt is not None:
            return "prompt"
        return "messages" if self.messages else "token_ids"
