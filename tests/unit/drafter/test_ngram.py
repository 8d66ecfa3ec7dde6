"""The n-gram index against brute force, and what its drafts promise."""

import gc
import math
import random
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.ngram import LEAST_PROBABILITY, NgramIndex
from tandem.draft_tree import Draft
from tandem.speculation import DraftShape
from tests.fakes.trees import token_paths

VOCAB = 4

_texts = st.lists(st.integers(0, VOCAB - 1), max_size=60)
_histories = st.lists(st.integers(0, VOCAB), max_size=10)
_limits = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda pair: (max(pair), min(pair)))
_shapes = st.sampled_from(DraftShape)


def index_of(text: list[int], limits: tuple[int, int] = (8, 2)) -> NgramIndex:
    index = NgramIndex(*limits)
    index.extend(text)
    return index


def occurrences(text: list[int], suffix: list[int]) -> list[int]:
    """Positions of the tokens that followed `suffix` in `text`."""
    return [i for i in range(len(suffix), len(text)) if text[i - len(suffix) : i] == suffix]


@given(_texts, _histories, _limits)
def test_matches_are_what_a_search_of_the_text_finds(
    text: list[int], history: list[int], limits: tuple[int, int]
) -> None:
    """Every length that occurs is there with all its places, but for those that the next longer one tells anyway."""
    longest, shortest = limits
    expected: list[tuple[int, list[int]]] = []
    for length in range(min(longest, len(history)), shortest - 1, -1):
        found = occurrences(text, history[-length:])
        if found and not (expected and len(found) == 1 and expected[-1][1] == found):
            expected.append((length, found))
    assert index_of(text, limits).matches(history) == expected


@given(st.lists(_texts, max_size=5), _limits)
def test_extending_in_pieces_is_extending_at_once(pieces: list[list[int]], limits: tuple[int, int]) -> None:
    index = NgramIndex(*limits)
    for piece in pieces:
        index.extend(piece)
    whole = [token for piece in pieces for token in piece]
    assert len(index) == len(whole)
    for length in range(3):
        history = whole[len(whole) - length :]
        assert index.matches(history) == index_of(whole, limits).matches(history)


@given(_texts, st.integers(0, VOCAB), _limits, st.integers(1, 40), _shapes)
def test_drafts_are_valid_ordered_and_found_in_the_text(
    text: list[int], anchor: int, limits: tuple[int, int], max_nodes: int, shape: DraftShape
) -> None:
    """Parents first, path probabilities non-increasing and not negligible, siblings distinct with probabilities that
    sum up to less than one, each node a token that followed at least ngram_min of the tokens before it."""
    draft = index_of(text, limits).draft(anchor, max_nodes, shape)
    possible = bool(occurrences(text, [*text, anchor][-limits[1] :])) and len(text) + 1 >= limits[1]
    assert bool(draft) == possible
    if not draft:
        assert draft == Draft([], [], [])
        return
    draft.check(VOCAB, max_nodes)
    if shape is DraftShape.BLOCK:
        assert draft.is_chain
    reached = [1.0]
    children: dict[int, list[int]] = {}
    for i, (parent, log_prob) in enumerate(zip(draft.parents, draft.log_probs, strict=True)):
        reached.append(reached[parent] * math.exp(log_prob))
        children.setdefault(parent, []).append(i)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(reached))
    assert min(reached) >= LEAST_PROBABILITY * (1 - 1e-9)
    for nodes in children.values():
        assert len({draft.tokens[i] for i in nodes}) == len(nodes)
        assert sum(math.exp(draft.log_probs[i]) for i in nodes) < 1
    for path in token_paths(draft):
        before = [*text, anchor, *path[:-1]][-limits[1] :]
        assert path[-1] in {text[end] for end in occurrences(text, before)}


@given(_texts, st.integers(0, VOCAB), st.integers(1, 20), _shapes)
def test_a_prefix_of_a_draft_is_the_draft_of_that_size(
    text: list[int], anchor: int, nodes: int, shape: DraftShape
) -> None:
    index = index_of(text, (4, 1))
    assert index.draft(anchor, 40, shape).truncated(nodes) == index.draft(anchor, nodes, shape)


def test_a_repeated_text_is_continued() -> None:
    """The whole point: seen once, proposed from its second occurrence on, beyond the end of the text if it loops."""
    text = [*range(100, 130), 1, 2, 3, *range(100, 104)]
    draft = index_of(text).draft(104, 10, DraftShape.BLOCK)
    assert draft.tokens == list(range(105, 115))
    assert index_of([7] * 20).draft(7, 15, DraftShape.BLOCK).tokens == [7] * 15


def test_the_longest_suffix_decides() -> None:
    """One occurrence of a long suffix beats many of a short one."""
    text = [1, 2, 3, 4, 50, *([9, 4, 60] * 5), 1, 2, 3]
    assert index_of(text, (4, 1)).draft(4, 1, DraftShape.BLOCK).tokens == [50]
    assert index_of(text, (1, 1)).draft(4, 1, DraftShape.BLOCK).tokens == [60]


def test_the_most_recent_occurrence_weighs_most() -> None:
    assert index_of([1, 2, 5, 8, 1, 2, 6, 8, 1], (2, 2)).draft(2, 1, DraftShape.BLOCK).tokens == [6]
    tree = index_of([1, 2, 5, 8, 1, 2, 6, 8, 1], (2, 2)).draft(2, 2, DraftShape.TREE)
    assert tree.tokens[:1] == [6]
    assert 5 in index_of([1, 2, 5, 8, 1, 2, 6, 8, 1], (2, 2)).draft(2, 9, DraftShape.TREE).tokens


def test_a_tree_holds_the_continuations_of_shorter_suffixes_too() -> None:
    """Longest suffix first; what only shorter ones saw comes behind, as its siblings."""
    text = [1, 2, 3, 70, 5, 2, 3, 80, 6, 3, 90, 1, 2]
    tree = index_of(text, (3, 1)).draft(3, 20, DraftShape.TREE)
    roots = [t for t, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0]
    assert roots[0] == 70
    assert sorted(roots[1:]) == [80, 90]


def test_nothing_to_propose_is_an_empty_draft() -> None:
    assert index_of([]).draft(3, 5, DraftShape.TREE) == Draft([], [], [])
    assert index_of([1, 2, 3]).draft(3, 5, DraftShape.BLOCK) == Draft([], [], [])


def source(seed: int, tokens: int, copied: float) -> list[int]:
    """Text that copies runs of itself with some probability and is random otherwise."""
    random_ = random.Random(seed)
    text = [random_.randrange(60) for _ in range(50)]
    while len(text) < tokens:
        if random_.random() < copied:
            start = random_.randrange(len(text) - 12)
            text += text[start : start + 12]
        else:
            text += [random_.randrange(60) for _ in range(12)]
    return text[:tokens]


@pytest.mark.parametrize("copied", [0.2, 0.8])
def test_probabilities_are_honest(copied: float) -> None:
    """Over a text that repeats itself seldom, and one that does often, first nodes are right about as often as they
    say, in each band of stated probability: the rates are learned, since the two texts differ."""
    text = source(3, 3000, copied)
    index = NgramIndex(8, 2)
    bands: dict[int, list[tuple[float, bool]]] = {}
    for anchor, follower in pairwise(text):
        draft = index.draft(anchor, 1, DraftShape.BLOCK)
        if draft and len(index) > 600:
            stated = math.exp(draft.log_probs[0])
            bands.setdefault(int(stated * 4), []).append((stated, draft.tokens[0] == follower))
        index.extend([anchor])
    judged = 0
    for band in bands.values():
        if len(band) >= 100:
            stated = sum(p for p, _ in band) / len(band)
            seen = sum(hit for _, hit in band) / len(band)
            assert abs(stated - seen) < 0.12, (stated, seen, len(band))
            judged += 1
    assert judged >= 2


@pytest.mark.parametrize(
    "make", [lambda n: [7] * n, lambda n: list(range(n)), lambda n: [random.Random(i).randrange(50) for i in range(n)]]
)
def test_time_is_linear_in_the_text(make: Callable[[int], list[int]]) -> None:
    """Constant, unique and random text alike: ten times the text takes about ten times as long. Without the garbage
    collector, whose passes go over all the test process holds."""
    took: list[float] = []
    gc.collect()
    gc.disable()
    for size in (3_000, 30_000):
        index, text = NgramIndex(8, 1), make(size)
        started = time.process_time()
        index.extend(text)
        index.draft(text[-1], 31, DraftShape.TREE)
        took.append(time.process_time() - started)
    gc.enable()
    assert took[1] < 40 * took[0] + 0.1
