"""Drafts: shape rules, truncation, and the walk that makes verification lossless."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.draft_tree import Draft, InvalidDraft, walk


@st.composite
def drafts(draw: st.DrawFn, vocab: int = 4) -> Draft:
    n = draw(st.integers(1, 12))
    parents = [draw(st.integers(0, i)) for i in range(n)]
    tokens = [draw(st.integers(0, vocab - 1)) for _ in range(n)]
    return Draft(tokens, parents, [0.0] * n)


def paths(draft: Draft) -> dict[int, tuple[int, ...]]:
    """Node index -> tokens from the root to it."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for i, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        found[i + 1] = (*found[parent], token)
    return found


@given(drafts(), st.lists(st.integers(0, 3), min_size=13, max_size=13))
def test_walk_emits_what_the_target_alone_would(draft: Draft, target: list[int]) -> None:
    """Whatever the draft, the chosen tokens begin the target's own sequence, one more than the longest match."""
    accepted, chosen = walk(draft, lambda index, depth: target[depth])
    assert chosen == target[: len(chosen)]
    assert len(chosen) == len(accepted) + 1
    by_node = paths(draft)
    longest = max(len(p) for p in by_node.values() if list(p) == target[: len(p)])
    # Duplicate siblings hide each other; the walk takes the last one.
    if len({(p, t) for p, t in zip(draft.parents, draft.tokens, strict=True)}) == len(draft):
        assert len(accepted) == longest
    for depth, index in enumerate(accepted):
        assert by_node[index] == tuple(target[: depth + 1])


def test_walk_without_a_draft_is_plain_decoding() -> None:
    assert walk(None, lambda index, depth: 7) == ([], [7])


@given(drafts(), st.data())
def test_every_prefix_of_a_draft_is_a_draft(draft: Draft, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, len(draft)))
    draft.truncated(nodes).check(vocab_size=4, max_nodes=nodes)


@pytest.mark.parametrize(
    ("draft", "field"),
    [
        (Draft([], [], []), "tokens"),
        (Draft([1, 2], [0], [0.0, 0.0]), "tokens, parents, log_probs"),
        (Draft([1, 9], [0, 1], [0.0, 0.0]), "tokens[1]"),
        (Draft([1, -1], [0, 1], [0.0, 0.0]), "tokens[1]"),
        (Draft([1, 2], [0, 2], [0.0, 0.0]), "parents[1]"),
        (Draft([1, 2], [-1, 0], [0.0, 0.0]), "parents[0]"),
        (Draft.block([1, 2, 3, 4], [0.0] * 4), "tokens"),
    ],
)
def test_a_broken_draft_is_refused_by_field(draft: Draft, field: str) -> None:
    with pytest.raises(InvalidDraft) as error:
        draft.check(vocab_size=8, max_nodes=3)
    assert str(error.value).startswith(field + ":")


def test_a_block_is_a_chain_and_a_fork_is_not() -> None:
    assert Draft.block([1, 2, 3], [0.0] * 3).is_chain
    assert not Draft([1, 2, 3], [0, 0, 1], [0.0] * 3).is_chain
