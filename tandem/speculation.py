"""What drafter and verifier tell each other, as plain data; protos/tandem/v1/speculation.proto is its wire form."""

from dataclasses import dataclass
from enum import Enum

from tandem.draft_tree import Draft

PROTOCOL_VERSION = 1


class SpeculationMode(Enum):
    """How drafts are used for one sequence."""

    OFF = "off"
    BLOCK = "block"
    TREE = "tree"
    AUTO = "auto"
    """Each step what pays most: a tree of some size, or plain decoding."""


class DraftSource(Enum):
    """What drafts come from."""

    DFLASH = "dflash"
    NGRAM = "ngram"


class DraftShape(Enum):
    """What a draft looks like."""

    BLOCK = "block"
    TREE = "tree"


@dataclass(frozen=True)
class Context:
    """Features of consecutive committed positions of one sequence."""

    sequence_id: int
    epoch: int
    start_position: int
    count: int
    features: bytes
    """count x hidden_size values, row-major, in the verifier's feature dtype; empty for an n-gram drafter."""
    token_ids: tuple[int, ...] = ()
    """The positions' tokens, for an n-gram drafter only."""


@dataclass(frozen=True)
class DraftRequest:
    """A draft wanted now, behind the sequence's first base_position positions."""

    sequence_id: int
    epoch: int
    base_position: int
    anchor: int
    max_nodes: int
    shape: DraftShape = DraftShape.BLOCK
    traceparent: str = ""
    """Of the trace context that the draft is traced under; empty where it is not."""


@dataclass(frozen=True)
class Round:
    """Work for a drafter, in this order: contexts, requests, releases."""

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
