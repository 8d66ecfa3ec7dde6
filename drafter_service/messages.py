"""What a drafter is told and what it answers, as plain data."""

from dataclasses import dataclass

from tandem.draft_tree import Draft


class ProtocolError(ValueError):
    """The verifier sent something that breaks the protocol; the message names the field and the value."""


@dataclass(frozen=True)
class Context:
    """Features of consecutive committed positions of one sequence."""

    sequence_id: int
    epoch: int
    start_position: int
    count: int
    features: bytes
    """count x hidden_size values, row-major, in the verifier's feature dtype."""


@dataclass(frozen=True)
class DraftRequest:
    """A draft wanted now, behind the sequence's first base_position positions."""

    sequence_id: int
    epoch: int
    base_position: int
    anchor: int
    max_nodes: int


@dataclass(frozen=True)
class Round:
    """Work, in this order: contexts, requests, releases."""

    contexts: list[Context]
    requests: list[DraftRequest]
    released_sequence_ids: list[int]


@dataclass(frozen=True)
class SequenceDraft:
    """The answer to one request."""

    sequence_id: int
    epoch: int
    base_position: int
    draft: Draft


@dataclass(frozen=True)
class Gap:
    """Features of this sequence are missing from held_positions on."""

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
