"""Drafts: candidate tokens after an anchor, as a chain (block) or a tree, in one shape. No torch here."""

import heapq
import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter


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

    @property
    def depths(self) -> list[int]:
        """Of each node its distance from the root, at least 1: node i stands at the anchor's position + depths[i]."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths[1:]

    def ancestors(self) -> list[list[int]]:
        """Of each node the indices above it, from the root (0) down to its parent: depths[i] of them."""
        paths: list[list[int]] = [[]]
        for parent in self.parents:
            paths.append([*paths[parent], parent])
        return paths[1:]

    def ancestor_bits(self) -> list[int]:
        """Of each node the indices of a verify step it sees, as bits: the root (bit 0), its ancestors and itself."""
        bits = [1]
        for i, parent in enumerate(self.parents):
            bits.append(bits[parent] | 1 << (i + 1))
        return bits[1:]

    def path_log_probs(self) -> list[float]:
        """Of each node the log-probability that the walk reaches it, as the draft model sees it: the sum of log_probs
        from the root's child down to it."""
        sums = [0.0]
        for parent, log_prob in zip(self.parents, self.log_probs, strict=True):
            sums.append(sums[parent] + log_prob)
        return sums[1:]

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


@dataclass(frozen=True)
class Candidates:
    """What a draft model proposes at each depth below the anchor."""

    tokens: list[list[int]]
    """[depth][candidate]: distinct tokens."""
    log_probs: list[list[list[float]]]
    """[depth][before][candidate]: given candidate `before` of the depth above. A depth whose candidates do not depend
    on what stands before them has one row, for all; the first depth always has one."""

    def ranked(self, depth: int, before: int) -> list[tuple[int, float]]:
        """(candidate, log-probability) behind candidate `before` of the depth above, best first; of equals the one that
        is listed first."""
        rows = self.log_probs[depth]
        return sorted(enumerate(rows[before if len(rows) > 1 else 0]), key=itemgetter(1), reverse=True)


def best_chain(candidates: Candidates, max_nodes: int) -> Draft:
    """The chain of up to max_nodes nodes that takes the most probable candidate at each depth."""
    return build_tree(candidates, min(max_nodes, len(candidates.tokens)), seeded=True)


def sample_chain(candidates: Candidates, temperature: float, uniforms: Sequence[float]) -> Draft:
    """A chain of one node per uniform number in [0, 1): each drawn from softmax(log_probs / temperature) behind the
    one before. The draft's log_probs are those of that distribution."""
    tokens: list[int] = []
    log_probs: list[float] = []
    chosen = 0
    for depth, uniform in enumerate(uniforms):
        rows = candidates.log_probs[depth]
        row = rows[chosen if len(rows) > 1 else 0]
        top = max(row)
        weights = [math.exp((log_prob - top) / temperature) for log_prob in row]
        total = sum(weights)
        chosen = min(bisect(list(accumulate(weights)), uniform * total), len(row) - 1)
        tokens.append(candidates.tokens[depth][chosen])
        log_probs.append(math.log(weights[chosen] / total))
    return Draft.block(tokens, log_probs)


_Node = tuple[int, float, int, list[tuple[int, float]], int]
"""A prefix: (index of its parent, the parent's path log-probability, depth from 0, its ranked siblings, its rank)."""

_Offer = tuple[float, int, int, float, int, list[tuple[int, float]], int]
"""A heap entry: (negated path log-probability, serial number, *node)."""


_SEED_SHARE = 0.95
"""Of the expected tokens of the best tree, what one that begins with the chain must keep."""


def may_seed_chain(max_nodes: int, depths: int) -> bool:
    """Whether max_nodes is near the block's proposals: enough for the whole chain, less than twice as many.

    A DFlash slot does not see what the slots before it propose: its probability is a mean over all they might say, and
    so too low where the most probable path was right so far. Best first then prefers breadth to depth, which a tree of
    such a size pays for with the very nodes a block would have had.
    """
    return depths <= max_nodes < 2 * depths


def build_tree(candidates: Candidates, max_nodes: int, seeded: bool | None = None) -> Draft:
    """The DDTree of up to max_nodes nodes: the most probable prefixes, best first (arXiv 2604.12989).

    A heap holds, for each node taken, its best child and its next sibling: the best prefix not yet taken is always
    among them, so the draft's first n nodes are the n most probable prefixes, for every n. Of equals the one that came
    up first is taken first. Seeded, the most probable chain comes first, cut to max_nodes, and what is left of
    max_nodes is then best first. None: seeded where may_seed_chain allows it and the draft model itself expects at
    most 5 % less of that tree. (Measured with a weak draft model: always seeding trees of 4 and 8 nodes costs 0.2
    tokens a step.)

    Takes O(max_nodes x (log max_nodes + k log k)) for k candidates per depth; fewer nodes if there are no more.
    """
    if seeded is not None:
        return _grow(candidates, max_nodes, seeded)
    best = _grow(candidates, max_nodes, False)
    if not may_seed_chain(max_nodes, len(candidates.tokens)):
        return best
    chained = _grow(candidates, max_nodes, True)
    return chained if _expected(chained) >= _SEED_SHARE * _expected(best) else best


def _expected(draft: Draft) -> float:
    """Tokens the draft model expects to be accepted."""
    return sum(map(math.exp, draft.path_log_probs()))


def _grow(candidates: Candidates, max_nodes: int, seeded: bool) -> Draft:
    depths = len(candidates.tokens)
    tokens: list[int] = []
    parents: list[int] = []
    log_probs: list[float] = []
    heap: list[_Offer] = []
    serial = 0
    siblings_behind: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def offer(parent: int, path: float, depth: int, siblings: list[tuple[int, float]], rank: int) -> None:
        nonlocal serial
        serial += 1
        heapq.heappush(heap, (-(path + siblings[rank][1]), serial, parent, path, depth, siblings, rank))

    def take(parent: int, path: float, depth: int, siblings: list[tuple[int, float]], rank: int) -> _Node | None:
        """Make it a node, offer its next sibling, return its best child."""
        candidate, log_prob = siblings[rank]
        tokens.append(candidates.tokens[depth][candidate])
        parents.append(parent)
        log_probs.append(log_prob)
        if rank + 1 < len(siblings):
            offer(parent, path, depth, siblings, rank + 1)
        if depth + 1 == depths:
            return None
        key = depth + 1, candidate if len(candidates.log_probs[depth + 1]) > 1 else 0
        below = siblings_behind.get(key)
        if below is None:
            below = siblings_behind[key] = candidates.ranked(*key)
        return len(tokens), path + log_prob, depth + 1, below, 0

    node: _Node | None = (0, 0.0, 0, candidates.ranked(0, 0), 0)
    if seeded:
        while node and len(tokens) < max_nodes:
            node = take(*node)
    elif node:
        offer(*node)
    while heap and len(tokens) < max_nodes:
        node = take(*heapq.heappop(heap)[2:])
        if node:
            offer(*node)
    return Draft(tokens, parents, log_probs)


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
