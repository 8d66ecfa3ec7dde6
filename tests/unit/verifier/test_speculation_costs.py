"""Cost estimates follow a drifting, noisy machine, and start from what is measured at start."""

import math
import random

import pytest

from tests.fakes.fake_target import FakeRunner
from verifier_service.speculation.costs import DraftCosts, StepCosts, StepCurve
from verifier_service.speculation.warm_up import StepLimits, measure_steps, timed_steps

CURVE = StepCurve((1, 2, 4, 8, 16, 32), (0.01, 0.01, 0.011, 0.012, 0.015, 0.02))


def test_a_captured_step_costs_what_its_capacity_costs() -> None:
    costs = StepCosts(StepCurve((1, 4, 8), (0.01, 0.01, 0.02), capacities=(1, 4, 8)))
    seconds = costs.predict_up_to(1, 9, 1, 0.0)
    assert seconds[1:4] == pytest.approx(seconds[1])
    assert seconds[4:8] == pytest.approx(seconds[7])
    assert seconds[3] < seconds[4]
    assert seconds[8] < seconds[9], "beyond the last capacity a step costs its own rows"


def test_costs_beyond_what_was_measured_rise_with_the_last_slope() -> None:
    costs = StepCosts(CURVE)
    assert costs.predict(64, 1, 0.0) == pytest.approx(0.02 + 32 * 0.005 / 16)


def test_drift_seen_in_one_bucket_moves_all_and_ratios_stay() -> None:
    """The machine becomes 40 % slower while only plain steps are seen: verify steps are predicted slower too."""
    rng = random.Random(0)
    costs = StepCosts(CURVE)
    for _ in range(300):
        for rows in (1, 8):
            costs.observe(rows, 1, 300.0, CURVE.alone(rows) * math.exp(rng.gauss(0, 0.1)))
    before = costs.predict(8, 1, 300.0) / costs.predict(1, 1, 300.0)
    for _ in range(300):
        costs.observe(1, 1, 300.0, 1.4 * 0.01 * math.exp(rng.gauss(0, 0.1)))
    assert costs.predict(1, 1, 300.0) == pytest.approx(0.014, rel=0.08)
    assert costs.predict(8, 1, 300.0) / costs.predict(1, 1, 300.0) == pytest.approx(before, rel=0.08)


def test_a_bucket_that_start_up_misjudged_is_corrected_alone() -> None:
    rng = random.Random(1)
    costs = StepCosts(CURVE)
    for _ in range(100):
        for rows, factor in ((1, 1.0), (4, 1.0), (16, 1.3)):
            costs.observe(rows, 1, 300.0, factor * float(CURVE.alone(rows)) * math.exp(rng.gauss(0, 0.1)))
    assert costs.predict(16, 1, 300.0) / costs.predict(1, 1, 300.0) == pytest.approx(1.3 * 1.5, rel=0.1)
    assert costs.predict(4, 1, 300.0) / costs.predict(1, 1, 300.0) == pytest.approx(1.1, rel=0.1)


def test_single_outliers_hardly_count_and_a_change_does() -> None:
    costs = StepCosts(CURVE)
    for _ in range(50):
        costs.observe(1, 1, 300.0, 0.01)
    costs.observe(1, 1, 300.0, 0.2)
    assert costs.predict(1, 1, 300.0) == pytest.approx(0.01, rel=0.05)
    for _ in range(8):
        costs.observe(1, 1, 300.0, 0.03)
    assert costs.predict(1, 1, 300.0) == pytest.approx(0.03, rel=0.15)


def test_what_was_never_measured_looks_cheaper_to_the_optimist_than_what_was() -> None:
    costs = StepCosts(CURVE)
    for _ in range(30):
        costs.observe(1, 1, 300.0, 0.01)
    thought, hoped = costs.predict_up_to(1, 15, 1, 300.0), costs.predict_up_to(1, 15, 1, 300.0, optimistic=True)
    assert hoped[0] == pytest.approx(thought[0], rel=0.03)
    assert hoped[15] < 0.9 * thought[15]


def test_a_drafters_first_round_does_not_count() -> None:
    """It takes several times as long as the next ones."""
    with_it, without = DraftCosts(), DraftCosts()
    with_it.observe(1, 32, 0.008, 0.0, 1)
    without.observe(1, 32, 0.0012, 0.0, 1)
    for drafts in (with_it, without):
        for _ in range(5):
            drafts.observe(1, 8, 0.0012, 0.0, 1)
    assert with_it.predict(1, 8, 0.0) == without.predict(1, 8, 0.0) == pytest.approx(0.0012, rel=0.1)


def test_drafts_of_many_nodes_are_not_thought_dear_because_few_were_asked_for() -> None:
    """Waits that scatter as they do in service, all of the same mean: what nobody asked for stays near it."""
    rng = random.Random(2)
    drafts = DraftCosts()
    for _ in range(3000):
        sequences = rng.choice((1, 2))
        drafts.observe(sequences, rng.choice((2, 3, 4)), 0.0015 * math.exp(rng.gauss(0, 0.4)), 0.0, 1)
    assert drafts.predict(1, 3, 0.0) == pytest.approx(0.0015, rel=0.3)
    assert drafts.predict(2, 32, 0.0) < 0.004


def test_draft_costs_take_their_scale_from_the_first_measurements_and_a_slowed_drafter_at_once() -> None:
    drafts = DraftCosts()
    assert not drafts.known
    for _ in range(5):
        drafts.observe(4, 8, 0.006, 0.0, 1)
    assert drafts.known
    assert drafts.predict(4, 8, 0.0) == pytest.approx(0.006, rel=0.05)
    assert drafts.optimistic(32, 1, 0.0) < drafts.predict(32, 1, 0.0)
    for _ in range(6):
        drafts.observe(4, 8, 0.056, 0.0, 1)
    assert drafts.predict(4, 8, 0.0) > 0.04


def test_waits_that_are_off_to_both_sides_are_no_change() -> None:
    """What is held up once comes early the next time: three such in a row say nothing of the fourth."""
    drafts = DraftCosts()
    for _ in range(50):
        drafts.observe(1, 8, 0.002, 0.0, 1)
    for seconds in (0.001, 0.004, 0.001, 0.004, 0.001):
        drafts.observe(1, 8, seconds, 0.0, 1)
        assert drafts.predict(1, 8, 0.0) == pytest.approx(0.002, rel=0.15)


def test_drafts_for_many_sequences_say_little_of_what_one_costs() -> None:
    """The guessed curve is wrong by half there: that is those numbers' own, not the machine's."""
    drafts = DraftCosts()
    for _ in range(100):
        drafts.observe(1, 8, 0.0075, 0.0, 1)
    for _ in range(20):
        drafts.observe(16, 2, 0.045, 0.0, 1)
    assert drafts.predict(16, 2, 0.0) == pytest.approx(0.045, rel=0.1)
    assert drafts.predict(1, 8, 0.0) == pytest.approx(0.0075, rel=0.3)


def limits(**changes: int) -> StepLimits:
    values = {"rows": 64, "sequences": 8, "kv_blocks": 257, "block_tokens": 16, "max_context": 512, **changes}
    return StepLimits(**values)


def test_the_curve_measured_at_start_is_the_machines() -> None:
    """Rows, sequences and context are told apart, through noise."""
    rng = random.Random(2)

    def measure(rows: int, sequences: int, context: int) -> float:
        seconds = 0.01 + 0.0005 * rows + 0.0003 * sequences + 1e-6 * sequences * context
        return seconds * math.exp(rng.gauss(0, 0.02))

    curve = measure_steps(measure, limits(), 10.0)
    assert list(curve.rows) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert list(curve.seconds) == sorted(curve.seconds)
    for rows in (1, 8, 64):
        assert float(curve.alone(rows)) == pytest.approx(measure(rows, 1, 64), rel=0.1)
    assert curve.per_sequence == pytest.approx(0.0003, rel=0.5)
    assert curve.per_context_token == pytest.approx(1e-6, rel=0.5)


def test_a_slow_machine_measures_less_and_never_nothing() -> None:
    rows_seen = []

    def measure(rows: int, sequences: int, context: int) -> float:
        rows_seen.append(rows)
        return 1.0 + rows

    curve = measure_steps(measure, limits(), 0.0)
    assert curve.rows == (1, 4)
    assert max(rows_seen) == 4


@pytest.mark.parametrize(("rows", "sequences", "context"), [(1, 1, 5), (40, 1, 3), (8, 8, 20), (9, 4, 0)])
def test_measured_steps_have_the_rows_they_are_named_for(rows: int, sequences: int, context: int) -> None:
    runner = Counting(257, 16)
    assert timed_steps(runner, limits())(rows, sequences, context) > 0
    (segments,) = runner.steps
    assert (sum(s.rows for s in segments), len(segments)) == (rows, sequences)
    assert all(s.start == context for s in segments)
    blocks = [block for s in segments for block in s.blocks]
    assert len(set(blocks)) == len(blocks), "sequences share blocks"
    assert 0 < min(blocks) <= max(blocks) < 257
    assert all(len(s.blocks) * 16 >= s.start + s.rows for s in segments)


class Counting(FakeRunner):
    """Reads no prefix: there is none."""

    def _read(self, blocks: list[int], position: int) -> int:
        return 0
