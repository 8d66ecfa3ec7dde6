"""The compiled walk says what tandem.draft_tree.walk says."""

import random

import pytest

from tandem.draft_tree import Draft
from tandem.kernels.walk import walk_rows
from tests.unit.kernels.test_walk import check_walks, random_draft


@pytest.mark.parametrize("shape", ["line", "star", "random"])
def test_trees_of_1_to_64_nodes_among_sequences_without(shape: str) -> None:
    rng = random.Random(shape)
    drafts: list[Draft | None] = [random_draft(shape, nodes, rng, vocab=2) for nodes in range(1, 65)]
    drafts[10] = None
    drafts[20] = Draft([], [], [])
    assert check_walks(walk_rows, drafts, seed=1, max_nodes=64, vocab=2, device="cuda") >= 32
