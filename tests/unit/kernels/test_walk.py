"""The walk of many trees in one call says what tandem.draft_tree.walk says of each, as reference and as kernel."""

import random
from collections.abc import Callable

import pytest
import torch

from tandem.draft_tree import Draft, walk
from tandem.kernels.triton.walk import launch_walk
from tandem.kernels.walk import walk_rows

Walk = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]

_IMPLEMENTATIONS = pytest.mark.parametrize("walk_all", [walk_rows, launch_walk], ids=["reference", "kernel"])


def random_draft(shape: str, nodes: int, rng: random.Random, vocab: int) -> Draft:
    parents = {
        "line": list(range(nodes)),
        "star": [0] * nodes,
        "random": [rng.randint(0, i) for i in range(nodes)],
    }[shape]
    return Draft([rng.randrange(vocab) for _ in range(nodes)], parents, [0.0] * nodes)


def check_walks(
    walk_all: Walk, drafts: list[Draft | None], seed: int, max_nodes: int, vocab: int, device: str = "cpu"
) -> int:
    """Compares every sequence's walk with the one on the host; None: a sequence without a root. Returns the number of
    accepted nodes. A sequence's root is not its first row: tokens of a prompt stand before it."""
    rng = random.Random(seed)
    tokens: list[int] = []
    parents: list[int] = []
    roots: list[int] = []
    for draft in drafts:
        if draft is None:
            roots.append(-1)
            continue
        before = rng.randrange(3)
        root = len(tokens) + before
        roots.append(root)
        tokens += [rng.randrange(vocab) for _ in range(before + 1)] + draft.tokens
        parents += [-1] * (before + 1) + [root + parent for parent in draft.parents]
    padding = rng.randrange(3)
    tokens += [0] * padding
    parents += [-1] * padding
    chosen = [rng.randrange(vocab) for _ in tokens]

    rows, counts = walk_all(
        torch.tensor(chosen, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(parents, dtype=torch.int32, device=device),
        torch.tensor(roots, dtype=torch.int32, device=device),
        max_nodes,
    )
    assert rows.dtype == counts.dtype == torch.int32
    assert rows.shape == (len(drafts), 1 + max_nodes)
    accepted_nodes = 0
    for draft, root, path, count in zip(drafts, roots, rows.tolist(), counts.tolist(), strict=True):
        if draft is None:
            assert (count, path) == (0, [-1] * (1 + max_nodes))
            continue
        accepted, emitted = walk(draft, lambda index, depth, root=root: chosen[root + index])
        assert path == [root, *(root + node for node in accepted)] + [-1] * (max_nodes - len(accepted))
        assert [chosen[row] for row in path[:count]] == emitted
        accepted_nodes += len(accepted)
    return accepted_nodes


@_IMPLEMENTATIONS
@pytest.mark.parametrize("shape", ["line", "star", "random"])
def test_walks_follow_the_targets_choices_in_trees_of_1_to_64_nodes(walk_all: Walk, shape: str) -> None:
    """Few tokens, so that equal siblings are common and paths get long."""
    rng = random.Random(shape)
    drafts: list[Draft | None] = [random_draft(shape, nodes, rng, vocab=2) for nodes in (1, 2, 5, 8, 31, 33, 64)]
    assert check_walks(walk_all, drafts, seed=1, max_nodes=64, vocab=2) >= 4


@_IMPLEMENTATIONS
def test_a_chain_that_the_target_agrees_with_is_accepted_to_its_end(walk_all: Walk) -> None:
    draft = Draft.block([0] * 16, [0.0] * 16)
    assert check_walks(walk_all, [draft, None, draft], seed=2, max_nodes=16, vocab=1) == 32


@_IMPLEMENTATIONS
def test_sequences_without_nodes_or_root_share_the_step(walk_all: Walk) -> None:
    rng = random.Random(3)
    drafts = [None, Draft([], [], []), random_draft("random", 7, rng, 2), None, Draft([], [], [])]
    check_walks(walk_all, drafts, seed=3, max_nodes=8, vocab=2)
    check_walks(walk_all, [Draft([], [], []), None], seed=4, max_nodes=0, vocab=2)
