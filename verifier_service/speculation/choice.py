"""One choice over all sequences of a step: how many nodes of each draft to verify."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Choice:
    """What to verify, for each of several independent steps (groups)."""

    nodes: np.ndarray
    """[groups, sequences] int: length of the prefix of each draft."""
    tokens: np.ndarray
    """[groups]: tokens the step is expected to emit."""
    seconds: np.ndarray
    """[groups]: predicted time of the step, without what was waited for drafts."""


@dataclass(frozen=True)
class Best:
    """How many nodes to verify in all, for each of several independent steps (groups)."""

    counts: np.ndarray
    """[groups] int."""
    tokens: np.ndarray
    """[groups]: tokens the step is expected to emit."""
    seconds: np.ndarray
    """[groups]: predicted time of the step, without what was waited for drafts."""
    order: np.ndarray
    """[groups, sequences * nodes] int: indices of all nodes, best first."""


def best_counts(gains: np.ndarray, tokens: float, seconds: np.ndarray, waited: float, plain_rate: float) -> Best:
    """The best numbers of nodes.

    gains: [groups, sequences, nodes], the tokens each node is expected to add, in the drafts' order, 0 beyond their
    ends. tokens: what the step emits without nodes. seconds: [1 + sequences * nodes], of the step with 0, 1, ... nodes.
    waited: seconds spent on drafts in this cycle. plain_rate: tokens per second of plain decoding.

    All sequences' nodes form one list, best first, and every prefix of it is looked at: the cost curve is a staircase
    on captured steps and concave where experts are loaded, so the best may lie beyond a stretch that does not pay. As
    every prefix of a draft is a draft, a node that is better than one before it waits for that one. The rate (tokens
    per second of the whole cycle) decides; where no choice reaches plain decoding's, time is worth what it earns there.
    """
    groups = len(gains)
    at = np.arange(groups)
    keys = np.minimum.accumulate(gains, axis=2).reshape(groups, -1)
    order = np.argsort(-keys, axis=1, kind="stable")
    emitted = np.full((groups, 1 + keys.shape[1]), float(tokens))
    emitted[:, 1:] += np.cumsum(gains.reshape(groups, -1)[at[:, None], order], axis=1)
    cycle = waited + seconds
    rate = np.maximum((emitted / cycle).max(axis=1), plain_rate)
    best = (emitted - rate[:, None] * cycle).argmax(axis=1)
    return Best(best, emitted[at, best], seconds[best], order)


def choose(gains: np.ndarray, tokens: float, seconds: np.ndarray, waited: float, plain_rate: float) -> Choice:
    """The best numbers of nodes, by draft. See best_counts."""
    groups, sequences, nodes = gains.shape
    best = best_counts(gains, tokens, seconds, waited, plain_rate)
    chosen = np.zeros((groups, sequences), dtype=int)
    for group, count in enumerate(best.counts):
        chosen[group] = np.bincount(best.order[group, :count] // max(1, nodes), minlength=sequences)
    return Choice(chosen, best.tokens, best.seconds)
