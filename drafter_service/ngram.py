"""Drafts from a sequence's own text: what followed the last tokens wherever they occurred before. Pure Python.

Prompt lookup decoding (Saxena 2023) finds the longest suffix that occurred before and proposes what followed it. Here
the suffixes of every position are kept in a trie, and what followed them is weighed as PPM does (Cleary and Witten
1984, with exclusion): the longest suffix speaks first, and with the probability that none of its continuations is right
the next shorter one is heard. How often a suffix of some length is right differs much between texts, so it is learned
from the sequence itself, starting from what was measured on prose and code.
"""

import heapq
import math
from collections.abc import Sequence

from tandem.draft_tree import Draft
from tandem.speculation import DraftShape

LEAST_PROBABILITY = 0.02
"""Nodes that the target reaches with less are not proposed."""

_RECENT = 16
"""Occurrences of a suffix that are looked at: the most recent ones."""

_RECENCY = 0.8
"""Weight of an occurrence relative to the next more recent one."""

_LEARNED_TAIL = 64
"""Tokens of one extension that hit rates are learned from: all that a step emits, and little of a long prompt."""


class _Context:
    """A suffix that occurred."""

    __slots__ = ("deeper", "ends")

    def __init__(self, end: int):
        self.ends = [end]
        """Positions of the tokens that followed it, in order."""
        self.deeper: dict[int, _Context] | None = None
        """The suffixes one token longer, by that token. None while it occurred once, and at the longest length."""


class _HitRate:
    """How often the next token is among the continuations of a suffix: a mean that starts from a prior, and forgets."""

    __slots__ = ("hits", "trials")

    _PRIOR_TRIALS = 8.0
    _MOST_TRIALS = 128.0

    def __init__(self, prior: float):
        self.trials = self._PRIOR_TRIALS
        self.hits = prior * self.trials

    def add(self, hit: bool) -> None:
        if self.trials >= self._MOST_TRIALS:
            self.trials /= 2
            self.hits /= 2
        self.trials += 1
        self.hits += hit


class NgramIndex:
    """The text of one sequence. Time per token and per node is bounded by ngram_max; memory is linear in the text."""

    def __init__(self, ngram_max: int, ngram_min: int):
        """ngram_max, ngram_min: tokens of the longest and shortest suffix that is looked up, the anchor included."""
        assert 1 <= ngram_min <= ngram_max
        self._longest = ngram_max
        self._shortest = ngram_min
        self._tokens: list[int] = []
        # A trie of suffixes read backwards: the root's children are the last tokens, theirs the tokens before, ...
        self._root: dict[int, _Context] = {}
        self._rates: dict[tuple[int, int, bool], _HitRate] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for left in range(len(tokens), 0, -1):
            token = tokens[-left]
            if left <= _LEARNED_TAIL:
                self._learn(token)
            self._append(token)

    def draft(self, anchor: int, max_nodes: int, shape: DraftShape) -> Draft:
        """The most probable continuations of the text with the anchor behind it; empty where nothing occurred before.

        A block follows the most probable token of each step, a tree takes the most probable paths, best first.
        """
        draft = Draft([], [], [])
        waiting: list[tuple[float, int, int, int, float, list[int]]] = []
        pushed = 0

        def push(parent: int, path: float, history: list[int]) -> None:
            nonlocal pushed
            followers = self._continuations(history)
            if shape is DraftShape.BLOCK and followers:
                best = max(followers, key=followers.__getitem__)
                followers = {best: followers[best]}
            for token, probability in followers.items():
                if path * probability >= LEAST_PROBABILITY:
                    heapq.heappush(waiting, (-path * probability, pushed, parent, token, probability, history))
                    pushed += 1

        push(0, 1.0, [*self._tokens[max(0, len(self) + 1 - self._longest) :], anchor])
        while waiting and len(draft) < max_nodes:
            negative_path, _, parent, token, probability, history = heapq.heappop(waiting)
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.log_probs.append(math.log(probability))
            if len(draft) < max_nodes:
                push(len(draft), -negative_path, [*history[-self._longest + 1 :], token])
        return draft

    def matches(self, history: list[int]) -> list[tuple[int, list[int]]]:
        """Suffixes of `history` that occurred in the text: (length, positions of the tokens that followed).

        Longest first. Of suffixes of several lengths that occurred once, in the same place, only the longest is given.
        """
        found: list[tuple[int, list[int]]] = []
        children: dict[int, _Context] | None = self._root
        for length in range(1, min(self._longest, len(history)) + 1):
            assert children is not None
            context = children.get(history[-length])
            if context is None:
                break
            children = context.deeper
            if children is None:
                length = self._match_length(history, context.ends[0], length)
            if length >= self._shortest:
                found.append((length, context.ends))
            if children is None:
                break
        found.reverse()
        return found

    def _match_length(self, history: list[int], end: int, length: int) -> int:
        """How far the text before `end` agrees with history, of which `length` tokens are known to."""
        most = min(self._longest, len(history), end)
        while length < most and self._tokens[end - length - 1] == history[-length - 1]:
            length += 1
        return length

    def _continuations(self, history: list[int]) -> dict[int, float]:
        """Probabilities of next tokens, summing up to less than 1; more recent ones come first among equals."""
        found: dict[int, float] = {}
        left = 1.0
        for length, ends in self.matches(history):
            weights = self._weights(ends, found)
            if weights:
                rate = self._rate(length, len(ends), bool(found))
                share = left * rate.hits / rate.trials
                scale = share / sum(weights.values())
                for token, weight in weights.items():
                    found[token] = scale * weight
                left -= share
                if left < LEAST_PROBABILITY:
                    break
        return found

    def _weights(self, ends: list[int], excluded: dict[int, float]) -> dict[int, float]:
        weights: dict[int, float] = {}
        weight = 1.0
        for end in ends[: -_RECENT - 1 : -1]:
            token = self._tokens[end]
            if token not in excluded:
                weights[token] = weights.get(token, 0.0) + weight
            weight *= _RECENCY
        return weights

    def _rate(self, length: int, occurrences: int, escaped: bool) -> _HitRate:
        key = (length, min(occurrences, 4), escaped)
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = _HitRate(_prior(*key))
        return rate

    def _learn(self, token: int) -> None:
        """Whether `token`, about to be appended, is what the suffixes of the text say."""
        excluded: dict[int, float] = {}
        for length, ends in self.matches(self._tokens[-self._longest :]):
            weights = self._weights(ends, excluded)
            if weights:
                self._rate(length, len(ends), bool(excluded)).add(token in weights)
                if token in weights:
                    return
                excluded |= weights

    def _append(self, token: int) -> None:
        tokens, position = self._tokens, len(self._tokens)
        children: dict[int, _Context] | None = self._root
        for length in range(1, min(self._longest, position) + 1):
            assert children is not None
            before = tokens[position - length]
            context = children.get(before)
            if context is None:
                # New, so anything longer is new too and tells nothing else.
                children[before] = _Context(position)
                break
            if context.deeper is None and length < self._longest:
                context.deeper = {}
                first = context.ends[0]
                if first > length:
                    context.deeper[tokens[first - length - 1]] = _Context(first)
            context.ends.append(position)
            children = context.deeper
        tokens.append(token)


def _prior(length: int, occurrences: int, escaped: bool) -> float:
    """Hit rates fitted to 56,000 tokens of Markdown and Python; escaped: longer suffixes were wrong."""
    if escaped:
        return 0.08 * occurrences
    return 1.0 - 0.8 * float(length**-0.55 * occurrences**-0.3)
