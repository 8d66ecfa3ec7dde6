"""Drafts: candidate tokens after an anchor, as a chain (block) or a tree, in one shape. No torch here."""

from dataclasses import dataclass


class InvalidDraft(ValueError):
    """A draft breaks the protocol; the message names the field and the value."""


@dataclass(frozen=True)
class Draft:
    """Nodes after a root (the anchor, index 0, implied). Node i of the lists has index i + 1.

    Nodes are in best-first order with parents before children, so any prefix of a draft is a draft.
    """

    tokens: list[int]
    parents: list[int]
    log_probs: list[float]

    @classmethod
    def block(cls, tokens: list[int], log_probs: list[float]) -> "Draft":
        """A chain."""
        return cls(tokens, list(range(len(tokens))), log_probs)

    def __len__(self) -> int:
        return len(self.tokens)

    def truncated(self, nodes: int) -> "Draft":
        """The draft's first `nodes` nodes."""
        return Draft(self.tokens[:nodes], self.parents[:nodes], self.log_probs[:nodes])

    @property
    def is_chain(self) -> bool:
        return all(parent == i for i, parent in enumerate(self.parents))

    def check(self, vocab_size: int, max_nodes: int) -> None:
        """InvalidDraft unless it has 1 to max_nodes nodes, tokens in the vocabulary and parents before children."""
        if not len(self.tokens) == len(self.parents) == len(self.log_probs):
            raise InvalidDraft(
                f"tokens, parents, log_probs: must be equally long, are {len(self.tokens)}, "
                f"{len(self.parents)}, {len(self.log_probs)}"
            )
        if not 1 <= len(self.tokens) <= max_nodes:
            raise InvalidDraft(f"tokens: must hold 1 to {max_nodes} nodes, holds {len(self.tokens)}")
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= token < vocab_size:
                raise InvalidDraft(f"tokens[{i}]: must be below {vocab_size}, is {token}")
            if not 0 <= parent <= i:
                raise InvalidDraft(f"parents[{i}]: must be in [0, {i}], is {parent}")
