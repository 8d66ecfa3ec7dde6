"""Which rank holds which experts of a mixture, so that ranks have equally much to do.

One layer at a time: its ranks wait for each other at its reduction, so what counts is the busiest rank of each layer.
Every rank holds equally many experts, which makes it a balanced kind of makespan scheduling and NP-hard. Longest
processing time first (Graham, 1969, "Bounds on multiprocessing timing anomalies"; with ranks that fill up, as in
DeepSeek's EPLB, github.com/deepseek-ai/EPLB) gives a start, and swaps of two experts improve it.
"""

from bisect import bisect_left
from collections.abc import Sequence

Ranks = list[list[int]]
"""Of each rank the ids of its experts, ascending."""


def in_order(experts: int, ranks: int) -> Ranks:
    """Where experts are without a placement: the first rank has the first ids."""
    held = experts // ranks
    return [list(range(rank * held, (rank + 1) * held)) for rank in range(ranks)]


def balanced(tokens: Sequence[int], ranks: int) -> Ranks:
    """A placement of one layer's experts; the same tokens always give the same. Its busiest rank is at most as busy as
    without a placement.

    tokens: of each expert, in order of ids; as many as a multiple of ranks.
    """
    starts = (_longest_first(tokens, ranks), in_order(len(tokens), ranks))
    return min((_swapped(tokens, start) for start in starts), key=lambda found: max(loads(tokens, found)))


def loads(tokens: Sequence[int], placed: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each rank."""
    return [sum(tokens[expert] for expert in held) for held in placed]


def imbalance(tokens: Sequence[int], placed: Sequence[Sequence[int]]) -> float:
    """Tokens of the busiest rank over the ranks' mean; 1 where there are none."""
    of_ranks = loads(tokens, placed)
    return max(of_ranks) * len(of_ranks) / sum(of_ranks) if sum(of_ranks) else 1.0


def _longest_first(tokens: Sequence[int], ranks: int) -> Ranks:
    room = len(tokens) // ranks
    placed: Ranks = [[] for _ in range(ranks)]
    of_ranks = [0] * ranks
    for expert in sorted(range(len(tokens)), key=lambda e: -tokens[e]):
        rank = min((r for r in range(ranks) if len(placed[r]) < room), key=lambda r: of_ranks[r])
        placed[rank].append(expert)
        of_ranks[rank] += tokens[expert]
    return [sorted(held) for held in placed]


def _swapped(tokens: Sequence[int], start: Ranks) -> Ranks:
    """Swap experts of the busiest rank for ones of others, always the pair that leaves the busier of the two ranks with
    the least, until no swap helps."""
    placed = [sorted(held, key=lambda e: (tokens[e], e)) for held in start]
    of_ranks = loads(tokens, placed)
    while True:
        busiest = max(range(len(placed)), key=lambda r: of_ranks[r])
        best = (of_ranks[busiest], 0, 0, 0)
        for other, held in enumerate(placed):
            gap = of_ranks[busiest] - of_ranks[other]
            sizes = [tokens[e] for e in held]
            for mine, expert in enumerate(placed[busiest]) if gap else ():
                # Best is to move half the gap; the two experts that come next to it suffice.
                wanted = bisect_left(sizes, tokens[expert] - gap / 2)
                for its in range(max(0, wanted - 1), min(len(sizes), wanted + 1)):
                    moved = tokens[expert] - sizes[its]
                    best = min(best, (max(of_ranks[busiest] - moved, of_ranks[other] + moved), other, mine, its))
        left, other, mine, its = best
        if left == of_ranks[busiest]:
            return [sorted(held) for held in placed]
        placed[busiest][mine], placed[other][its] = placed[other][its], placed[busiest][mine]
        for rank in (busiest, other):
            placed[rank].sort(key=lambda e: (tokens[e], e))
            of_ranks[rank] = sum(tokens[e] for e in placed[rank])
