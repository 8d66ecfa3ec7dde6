"""Drafts: candidate tokens after an anchor, as a chain (block) or a tree, in one shape. No torch here."""

from collections.abc import Callable
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


def walk(draft: Draft | None, choose: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
    """Follow the target's own choices through a draft, from the root on.

    choose(index, depth) is the target's token after node `index` (0: the root), which sits `depth` below the root.
    While a child carries that token the walk moves there; the first choice without a child is the bonus. Every emitted
    token is the target's choice at its own prefix, so what is emitted is what the target alone would emit, at any
    temperature (DDTree, arXiv 2604.12989).

    Returns (indices of the accepted nodes, chosen tokens): the tokens of the accepted nodes, then the bonus.
    """
    children: dict[tuple[int, int], int] = {}
    if draft:
        for i, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            children.setdefault((parent, token), i + 1)
    accepted: list[int] = []
    chosen: list[int] = []
    index: int | None = 0
    while index is not None:
        token = choose(index, len(accepted))
        chosen.append(token)
        index = children.get((index, token))
        if index is not None:
            accepted.append(index)
    return accepted, chosen
