"""What it takes to build a DDTree from a draft model's candidates, without the model.

    python -m benchmarks.tree_builder

Prints the median time per tree by node budget, for slots that do not see each other (DFlash) and for a selector's
scores that depend on the token before (DFlash2).
"""

import argparse
import math
import random
import statistics
import time

from tandem.draft_tree import Candidates, build_tree

WIDTHS = {"independent": 32, "by parent": 16}
NODES = (8, 16, 32, 64, 128, 256)


def random_candidates(rng: random.Random, depths: int, width: int, by_parent: bool) -> Candidates:
    """Rows as peaked as a trained draft model's: the best candidate mostly takes half of the probability."""

    def row() -> list[float]:
        scores = sorted((rng.gauss(0, 3) for _ in range(width)), reverse=not by_parent)
        total = math.log(sum(map(math.exp, scores)))
        return [score - total for score in scores]

    tokens = [list(range(width)) for _ in range(depths)]
    rows = [[row() for _ in range(width if by_parent and depth else 1)] for depth in range(depths)]
    return Candidates(tokens, rows)


def median_seconds(candidates: list[Candidates], nodes: int, repeats: int) -> float:
    """Median over `repeats` passes of the mean over the candidates."""
    passes = []
    for _ in range(repeats):
        started = time.perf_counter()
        for c in candidates:
            build_tree(c, nodes)
        passes.append((time.perf_counter() - started) / len(candidates))
    return statistics.median(passes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, default=15, help="proposals of a block")
    parser.add_argument("--trees", type=int, default=50, help="different trees per pass")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    rng = random.Random(0)
    for kind, width in WIDTHS.items():
        candidates = [random_candidates(rng, options.depths, width, kind == "by parent") for _ in range(options.trees)]
        for nodes in NODES:
            seconds = median_seconds(candidates, nodes, options.repeats)
            print(f"{kind:11} depth {options.depths}, {width} candidates, {nodes:3} nodes: {seconds * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
