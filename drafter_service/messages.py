"""What a drafter answers beyond drafts, as plain data."""

from dataclasses import dataclass

from tandem.speculation import SequenceDraft


class ProtocolError(ValueError):
    """The verifier sent something that breaks the protocol; the message names the field and the value."""


@dataclass(frozen=True)
class Gap:
    """Features, or tokens, of this sequence are missing from held_positions on."""

    sequence_id: int
    epoch: int
    held_positions: int


@dataclass(frozen=True)
class Answer:
    """What some rounds led to."""

    drafts: list[SequenceDraft]
    gaps: list[Gap]
    compute_us: int
    """From the rounds being taken up to the drafts being known."""
