"""Drafts that branch."""

import random

from tandem.draft_tree import Draft


def random_tree(parents: list[int], vocab: int, seed: int) -> Draft:
    """A tree of this shape with random tokens, all distinct."""
    return Draft(random.Random(seed).sample(range(vocab), len(parents)), parents, [0.0] * len(parents))


def token_paths(draft: Draft) -> list[tuple[int, ...]]:
    """Of each node the tokens from the root's child down to it."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def tree_around(truth: list[int], nodes: int, vocab: int, rng: random.Random) -> Draft:
    """A random tree in which about half the nodes are a path along `truth`, with wrong nodes before, between and
    behind them. Siblings are distinct."""
    tokens: list[int] = []
    parents: list[int] = []
    seen: set[tuple[int, int]] = set()
    true_end = depth = 0
    while len(tokens) < nodes:
        right = depth < len(truth) and rng.random() < 0.5
        child = (true_end, truth[depth]) if right else (rng.randrange(len(tokens) + 1), rng.randrange(vocab))
        if child in seen:
            continue
        seen.add(child)
        parents.append(child[0])
        tokens.append(child[1])
        if right:
            true_end, depth = len(tokens), depth + 1
    return Draft(tokens, parents, [0.0] * nodes)
