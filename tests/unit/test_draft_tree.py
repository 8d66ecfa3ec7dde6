"""Drafts: shape rules, truncation, the walk that makes verification lossless, and how trees are built."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.draft_tree import (
    Candidates,
    Draft,
    InvalidDraft,
    best_chain,
    build_tree,
    sample_chain,
    walk,
)


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


@given(drafts())
def test_depths_ancestors_and_bits_are_those_of_the_paths(draft: Draft) -> None:
    """What a verifier lays its rows and its mask out by, against following parents one by one."""
    sums = draft.path_log_probs()
    for i in range(len(draft)):
        above, node = [], i + 1
        while node:
            node = draft.parents[node - 1]
            above.insert(0, node)
        assert draft.ancestors()[i] == above
        assert draft.depths[i] == len(above)
        assert draft.ancestor_bits()[i] == sum(1 << j for j in [*above, i + 1])
        assert sums[i] == pytest.approx(sum(draft.log_probs[j - 1] for j in [*above[1:], i + 1]))


def normed(scores: list[float]) -> list[float]:
    total = math.log(sum(map(math.exp, scores)))
    return [min(0.0, score - total) for score in scores]


@st.composite
def candidate_sets(draw: st.DrawFn) -> Candidates:
    """1 to 4 depths of 1 to 4 candidates, with and without dependence on what stands before, ties included."""
    depths, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dependent = draw(st.booleans())
    score = st.integers(-6, 0).map(lambda n: n / 2) if draw(st.booleans()) else st.floats(-9, 0)
    scores = st.lists(score, min_size=width, max_size=width)
    tokens = [draw(st.permutations(range(10, 10 + width))) for _ in range(depths)]
    rows = [[normed(draw(scores)) for _ in range(width if dependent and d else 1)] for d in range(depths)]
    return Candidates(tokens, rows)


def all_prefixes(candidates: Candidates) -> dict[tuple[int, ...], float]:
    """Every path of tokens -> its log-probability, by enumeration."""
    found = {}
    for length in range(1, len(candidates.tokens) + 1):
        for picks in itertools.product(*(range(len(tokens)) for tokens in candidates.tokens[:length])):
            total = 0.0
            for depth, pick in enumerate(picks):
                rows = candidates.log_probs[depth]
                total += rows[picks[depth - 1] if len(rows) > 1 else 0][pick]
            found[tuple(candidates.tokens[d][pick] for d, pick in enumerate(picks))] = total
    return found


def conditional(candidates: Candidates, path: tuple[int, ...]) -> float:
    """The log-probability of a path's last token behind the rest of it."""
    depth = len(path) - 1
    rows = candidates.log_probs[depth]
    before = candidates.tokens[depth - 1].index(path[-2]) if len(rows) > 1 else 0
    return rows[before][candidates.tokens[depth].index(path[-1])]


@settings(max_examples=1000)
@given(candidate_sets(), st.integers(1, 40))
def test_an_unseeded_tree_is_the_best_of_every_size(candidates: Candidates, max_nodes: int) -> None:
    """The draft's first n nodes are the n most probable prefixes of all, for every n; its log-probabilities are those
    of each node behind its parent."""
    best = all_prefixes(candidates)
    draft = build_tree(candidates, max_nodes, seeded=False)
    assert len(draft) == min(max_nodes, len(best))
    by_node = paths(draft)
    taken = [by_node[i] for i in range(1, len(draft) + 1)]
    assert len(set(taken)) == len(taken)
    assert [best[path] for path in taken] == sorted(best.values(), reverse=True)[: len(draft)]
    assert draft.log_probs == [conditional(candidates, path) for path in taken]
    assert draft.path_log_probs() == [best[path] for path in taken]


@settings(max_examples=300)
@given(candidate_sets(), st.integers(1, 40))
def test_a_seeded_tree_is_the_chain_and_then_the_best(candidates: Candidates, max_nodes: int) -> None:
    """The most probable chain comes first; of what is left, the most probable prefixes follow, best first."""
    draft = build_tree(candidates, max_nodes, seeded=True)
    chain_nodes = min(max_nodes, len(candidates.tokens))
    by_node = paths(draft)
    taken = [by_node[i] for i in range(1, len(draft) + 1)]
    chain: tuple[int, ...] = ()
    for depth in range(chain_nodes):
        steps = [(*chain, token) for token in candidates.tokens[depth]]
        assert taken[depth][:-1] == chain
        assert conditional(candidates, taken[depth]) == max(conditional(candidates, step) for step in steps)
        chain = taken[depth]
    best = all_prefixes(candidates)
    rest = sorted((log_prob for path, log_prob in best.items() if path not in taken[:chain_nodes]), reverse=True)
    assert [best[path] for path in taken[chain_nodes:]] == rest[: len(draft) - chain_nodes]
    draft.check(vocab_size=20, max_nodes=max_nodes)


@given(candidate_sets(), st.integers(1, 40))
def test_scores_that_do_not_depend_on_the_parent_give_the_plain_tree(candidates: Candidates, max_nodes: int) -> None:
    """One row for all is the same as that row behind every candidate."""
    first_rows = [rows[:1] for rows in candidates.log_probs]
    repeated = [rows * (len(candidates.tokens[0]) if depth else 1) for depth, rows in enumerate(first_rows)]
    plain = build_tree(Candidates(candidates.tokens, first_rows), max_nodes)
    assert build_tree(Candidates(candidates.tokens, repeated), max_nodes) == plain


@given(candidate_sets(), st.integers(1, 40))
def test_the_chain_comes_first_only_where_it_costs_little(candidates: Candidates, max_nodes: int) -> None:
    """Near the block's own size, and if the draft model expects at most 5 % less of such a tree; best first else."""
    best, chained = (build_tree(candidates, max_nodes, seeded=seeded) for seeded in (False, True))
    near = len(candidates.tokens) <= max_nodes < 2 * len(candidates.tokens)
    expected, kept = (sum(map(math.exp, draft.path_log_probs())) for draft in (best, chained))
    assert build_tree(candidates, max_nodes) == (chained if near and kept >= 0.95 * expected else best)


def test_a_flat_draft_is_not_seeded_and_a_sure_one_is() -> None:
    """A draft model that is unsure gets breadth; one that is nearly sure keeps its block in a tree of that size."""
    flat = Candidates([[1, 2, 3]] * 4, [[normed([0.1, 0.0, 0.0])]] * 4)
    assert sorted(set(build_tree(flat, 6).depths)) == [1, 2]
    sure = Candidates([[1, 2]] * 4, [[[math.log(0.97), math.log(0.03)]]] * 3 + [[[math.log(0.02), math.log(0.015)]]])
    assert sorted(set(build_tree(sure, 4, seeded=False).depths)) == [1, 2, 3]
    assert build_tree(sure, 4).is_chain


def test_of_equals_the_first_listed_comes_first() -> None:
    """Trees are the same on every machine: ties are broken by the candidates' order, and what came up first goes
    first."""
    even = Candidates([[5, 3, 9], [7, 8, 1]], [[[-1.0] * 3], [[-1.0] * 3]])
    draft = build_tree(even, 6, seeded=False)
    assert draft.tokens == [5, 3, 9, 7, 7, 7]
    assert draft.parents == [0, 0, 0, 1, 2, 3]


@given(candidate_sets(), st.integers(1, 6))
def test_the_best_chain_is_greedy(candidates: Candidates, max_nodes: int) -> None:
    """Each node is the most probable behind the one before, not part of the most probable whole."""
    chain = best_chain(candidates, max_nodes)
    assert chain.is_chain
    assert len(chain) == min(max_nodes, len(candidates.tokens))
    path: tuple[int, ...] = ()
    for depth, token in enumerate(chain.tokens):
        options = [conditional(candidates, (*path, t)) for t in candidates.tokens[depth]]
        path = (*path, token)
        assert chain.log_probs[depth] == conditional(candidates, path) == max(options)


@given(candidate_sets(), st.floats(0.1, 5), st.lists(st.floats(0, 1, exclude_max=True), min_size=4, max_size=4))
def test_a_sampled_chain_inverts_the_distribution(
    candidates: Candidates, temperature: float, uniforms: list[float]
) -> None:
    """The uniform number falls into the interval that the drawn candidate has in softmax(log_probs / temperature)."""
    depths = len(candidates.tokens)
    chain = sample_chain(candidates, temperature, uniforms[:depths])
    path: tuple[int, ...] = ()
    for depth, token in enumerate(chain.tokens):
        options = [conditional(candidates, (*path, t)) / temperature for t in candidates.tokens[depth]]
        probabilities = [math.exp(x) for x in normed(options)]
        drawn = candidates.tokens[depth].index(token)
        below = sum(probabilities[:drawn])
        assert below - 1e-9 <= uniforms[depth] <= below + probabilities[drawn] + 1e-9
        assert math.exp(chain.log_probs[depth]) == pytest.approx(probabilities[drawn])
        path = (*path, token)
