"""The controller's present choice, for people."""

from dataclasses import dataclass

from tandem.speculation import SpeculationMode


@dataclass(frozen=True)
class Present:
    """What is chosen now and why."""

    mode: SpeculationMode
    """TREE while drafts are asked for, else OFF."""
    nodes: int
    """Asked for per sequence."""
    reason: str
    gain: float
    """Predicted tokens per second over plain decoding's; 0 before it is known."""
    expected_tokens: float
    """Per sequence and step."""
    draft_seconds: float
    step_seconds: float
    plain_step_seconds: float
    calibration: tuple[float, ...]
    """Accepted over expected by the draft model, at depth 1, 2, ..."""
