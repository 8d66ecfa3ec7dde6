"""The choice over all sequences' nodes is the best one, and what it rests on is what drafts and targets do."""

import itertools
import math
import random
import time
from statistics import median

import numpy as np
import pytest

from tandem.draft_tree import Draft
from tests.fakes.speculation_world import MAX_NODES, World, dense_gpu, fast_drafter
from verifier_service.speculation.choice import choose
from verifier_service.speculation.controller import DecodeLoad
from verifier_service.speculation.paths import Calibration, DraftMemory, Paths


def random_draft(rng: random.Random, nodes: int) -> Draft:
    parents = [rng.randint(0, i) for i in range(nodes)]
    return Draft(list(range(nodes)), parents, [math.log(rng.uniform(0.05, 1.0)) for _ in range(nodes)])


@pytest.mark.parametrize("seed", range(30))
def test_no_other_prefixes_have_a_better_rate(seed: int) -> None:
    """Against all combinations, on staircases, concave and convex costs, gains in best-first order."""
    rng = random.Random(seed)
    sequences, nodes = 3, 4
    gains = np.sort(np.array([[rng.random() for _ in range(nodes)] for _ in range(sequences)]))[:, ::-1]
    shapes = [lambda k: 1 + 0.5 * (k // 4), lambda k: 1 + math.sqrt(k), lambda k: 1 + 0.02 * k * k]
    seconds = np.array([shapes[seed % 3](k) for k in range(1 + sequences * nodes)])
    waited = rng.choice([0.0, 0.5])
    choice = choose(gains[None], float(sequences), seconds, waited, 0.0)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = sequences + sum(gains[i, :k].sum() for i, k in enumerate(counts))
        return float(tokens / (waited + seconds[sum(counts)]))

    best = max(rate(c) for c in itertools.product(range(nodes + 1), repeat=sequences))
    chosen = tuple(choice.nodes[0].tolist())
    assert rate(chosen) == pytest.approx(best)
    assert choice.tokens[0] == pytest.approx(rate(chosen) * (waited + choice.seconds[0]))


def test_free_rows_are_filled_across_sequences_by_what_they_add() -> None:
    """A captured step has room for 3 more rows: they go to the most probable nodes, whoever's they are."""
    gains = np.array([[[0.9, 0.8, 0.1], [0.5, 0.2, 0.1]]])
    seconds = np.array([1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0])
    assert choose(gains, 2.0, seconds, 0.0, 0.0).nodes.tolist() == [[2, 1]]


def test_a_better_node_behind_a_worse_one_waits_for_it() -> None:
    """Prefixes only: a draft is never cut in the middle."""
    gains = np.array([[[0.1, 0.9], [0.3, 0.0]]])
    seconds = np.array([1.0, 1.01, 1.5, 1.51, 1.52])
    nodes = choose(gains, 2.0, seconds, 0.0, 0.0).nodes[0]
    assert nodes.tolist() == [0, 1]


def test_nothing_is_verified_below_plain_decodings_rate() -> None:
    gains, seconds = np.array([[[0.2]]]), np.array([1.0, 1.15])
    assert choose(gains, 1.0, seconds, 1.0, 0.0).nodes.tolist() == [[1]]
    assert choose(gains, 1.0, seconds, 1.0, 2.0).nodes.tolist() == [[0]]


@pytest.mark.parametrize("seed", range(20))
def test_paths_are_sums_from_the_root(seed: int) -> None:
    rng = random.Random(seed)
    drafts = [random_draft(rng, rng.choice([0, 1, 5, 12])) for _ in range(rng.randint(1, 5))]
    paths = Paths.of(drafts, [i % 2 == 1 for i in range(len(drafts))], range(len(drafts)))
    for row, draft in enumerate(drafts):
        found = paths.probabilities[row, : len(draft)]
        assert found == pytest.approx(np.exp(draft.path_log_probs()))
        assert (paths.cells[row, : len(draft)] // 4 % 17).tolist() == draft.depths
        assert (paths.cells[row] // 68 == row % 2).all()
        assert not paths.probabilities[row, len(draft) :].any()


def test_a_calibration_comes_to_predict_what_is_accepted() -> None:
    """Per depth and confidence; an overconfident draft model is believed less."""
    world = World(dense_gpu, fast_drafter, truth=(0.6, 0.7))
    calibration = Calibration()
    for step in range(300):
        index = step % len(world.drafts)
        paths = Paths.of([world.drafts[index]], [False], [1])
        calibration.observe(paths.probabilities[0], paths.cells[0], world.accepted(index, MAX_NODES), 1, 0)
    paths = Paths.of(world.drafts, [False] * len(world.drafts), range(len(world.drafts)))
    expected = sum(world.expected(i, MAX_NODES) for i in range(len(world.drafts)))
    assert calibration.gains(paths.probabilities, paths.cells).sum() == pytest.approx(expected, rel=0.15)
    depths = calibration.per_depth()
    assert depths[0] == pytest.approx(0.6, rel=0.2)
    assert depths[2] < depths[1] < depths[0]


def test_sampled_sequences_are_calibrated_apart_from_greedy_ones() -> None:
    """What is seen of one sort is what the other starts from, and no more."""
    good, bad = World(dense_gpu, fast_drafter, truth=(0.9, 1.0)), World(dense_gpu, fast_drafter, truth=(0.3, 1.0))
    draft = good.drafts[:1]
    greedy, sampled = Paths.of(draft, [False], [1]), Paths.of(draft, [True], [2])
    calibration = Calibration()

    def gain(paths: Paths) -> float:
        return float(calibration.gains(paths.probabilities, paths.cells).sum() / paths.probabilities.sum())

    for step in range(300):
        paths = Paths.of([good.drafts[step % 256]], [False], [1])
        calibration.observe(paths.probabilities[0], paths.cells[0], good.accepted(step % 256, MAX_NODES), 1, 0)
    assert gain(greedy) == pytest.approx(0.9, rel=0.15)
    assert gain(sampled) == pytest.approx(gain(greedy), rel=0.1)
    for step in range(300):
        paths = Paths.of([bad.drafts[step % 256]], [True], [2])
        calibration.observe(paths.probabilities[0], paths.cells[0], bad.accepted(step % 256, MAX_NODES), 0, 1)
    assert gain(greedy) == pytest.approx(0.9, rel=0.15)
    assert gain(sampled) < 0.5 * gain(greedy)
    assert calibration.deviation(True, False) != calibration.deviation(False, True)


@pytest.mark.parametrize("seed", range(5))
def test_paths_joined_are_those_of_all_drafts_together(seed: int) -> None:
    """Of drafts of unequal lengths, some without nodes."""
    rng = random.Random(seed)
    drafts = [random_draft(rng, rng.choice((0, 1, 3, 7))) for _ in range(9)]
    sampled = [rng.random() < 0.5 for _ in drafts]
    cuts = sorted(rng.sample(range(1, 9), 3))
    spans = list(zip([0, *cuts], [*cuts, 9], strict=True))
    joined = Paths.joined([Paths.of(drafts[a:b], sampled[a:b], range(a, b)) for a, b in spans])
    together = Paths.of(drafts, sampled, range(9))
    present = np.arange(together.cells.shape[1]) < together.lengths[:, None]
    assert np.array_equal(joined.probabilities, together.probabilities)
    assert np.array_equal(joined.cells[present], together.cells[present])
    assert np.array_equal(joined.lengths, together.lengths)
    assert np.array_equal(joined.sampled, together.sampled)
    assert np.array_equal(joined.sequences, together.sequences)


def test_nodes_that_were_not_asked_for_are_extrapolated_and_those_that_do_not_exist_are_not() -> None:
    memory, calibration = DraftMemory(4), Calibration()
    short = Paths.of([Draft.block([1, 2], [math.log(0.8), math.log(0.5)])], [False], [1])
    memory.add(short, np.array([2]))
    cut = memory.gains(memory.stand_ins(1, 1, [1]), calibration)[0, 0]
    assert cut[:2] == pytest.approx([0.8, 0.4])
    assert cut[1] > cut[2] > cut[3] > 0
    memory.add(short, np.array([4]))
    assert memory.gains(memory.stand_ins(1, 1, [1]), calibration)[0, 0] == pytest.approx([0.8, 0.4, 0, 0])


def test_a_decision_takes_well_under_a_millisecond_at_32_sequences() -> None:
    """Budgets of 32 drafts of 8 nodes and the decision to ask, per step; generous, as test machines are shared."""
    world = World(dense_gpu, fast_drafter, captured=True)
    controller = world.controller()
    took = []
    for step in range(60):
        drafts = [draft.truncated(8) for draft in world.drafts[step : step + 32]]
        started = time.thread_time()
        controller.plan(DecodeLoad(32, 32, 300.0, greedy_ids=tuple(range(32))))
        paths = Paths.of(drafts, [False] * 32, range(32))
        controller.observe_drafts(paths, np.full(32, 8), np.ones(32, dtype=bool))
        controller.budget(paths, 32.0, 32, 32, 9600.0)
        took.append(time.thread_time() - started)
        controller.observe_wait(32, 8, 0.003, True)
        controller.observe_step(64, 32, 9600.0, 0.02)
    assert median(took[10:]) < 1e-3


def test_drafts_that_propose_nothing_are_remembered_as_worth_nothing() -> None:
    """An n-gram drafter often has nothing to say: the mean over its drafts must not leave those out."""
    memory, calibration = DraftMemory(4), Calibration()
    empty, full = Draft([], [], []), Draft.block([1], [math.log(0.8)])
    memory.add(Paths.of([empty, full, empty, empty], [False] * 4, range(4)), np.full(4, 4))
    memory.add(Paths.of([empty], [False], [4]), np.full(1, 4))
    assert memory.gains(memory.stand_ins(5, 1, []), calibration).sum() == pytest.approx(0.8)


def worth(probability: float, sequence: int, count: int) -> Paths:
    """Drafts of one node of a sequence."""
    return Paths.of([Draft.block([1], [math.log(probability)])] * count, [False] * count, [sequence] * count)


def test_a_sequence_is_judged_by_its_own_drafts_and_a_new_one_by_everybodys() -> None:
    """Each text counts alike for a new one, however many drafts it had; a few of its own do not yet outweigh them."""
    memory, calibration = DraftMemory(1), Calibration()
    for paths in (worth(0.9, 1, 200), worth(0.5, 2, 24), worth(0.1, 3, 4)):
        memory.add(paths, np.ones(len(paths.lengths), dtype=int))

    def gain(sequence: int, groups: int = 8) -> float:
        return float(memory.gains(memory.stand_ins(groups, 1, [sequence]), calibration).mean())

    assert gain(9, groups=3) == pytest.approx((0.9 + 0.5 + 0.1) / 3)
    assert gain(1) > 0.7
    assert gain(2) == pytest.approx(0.5, abs=0.1)
    assert 0.1 < gain(3) < gain(9)


def test_what_a_sequence_accepts_of_what_its_drafts_promise_counts_for_it() -> None:
    memory, calibration = DraftMemory(1), Calibration()
    for sequence in (1, 2):
        memory.add(worth(0.8, sequence, 24), np.ones(24, dtype=int))
    for _ in range(24):
        memory.settle(1, 0.8, 0)
        memory.settle(2, 0.8, 1)
    own = [float(memory.gains(memory.stand_ins(1, 1, [s]), calibration).mean()) for s in (1, 2)]
    assert own[0] < 0.4 < 0.8 < own[1] <= 1.0
    assert memory.trust(1) < 0.4
    assert memory.trust(3) == 1.0


def test_a_memory_that_is_full_forgets_who_has_not_drafted_for_longest() -> None:
    """Many short texts, each with one draft: all places are taken again and again, none is lost."""
    memory = DraftMemory(1)
    for sequence in range(3 * DraftMemory.SIZE):
        memory.add(worth(0.5, sequence, 1), np.ones(1, dtype=int))
    held = memory.stand_ins(DraftMemory.SIZE, 1, [])
    assert sorted(held.ravel()) == list(range(DraftMemory.SIZE))
    memory.settle(0, 1.0, 0)
    assert memory.trust(0) == 1.0
    memory.settle(3 * DraftMemory.SIZE - 1, 1.0, 0)
    assert memory.trust(3 * DraftMemory.SIZE - 1) < 1.0
