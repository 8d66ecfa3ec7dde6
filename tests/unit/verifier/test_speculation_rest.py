"""While drafts do not pay the planner looks at one step in sixteen, and at every one that is of another kind."""

from dataclasses import dataclass, field

import pytest

from tandem.draft_tree import Draft
from tandem.speculation import DraftShape, SpeculationMode
from tests.fakes.speculation_planners import decoding_sequence, planner_over
from verifier_service.sequence import PendingDraft
from verifier_service.speculation.controller import DecodeLoad, Order, SpeculationController
from verifier_service.speculation.costs import StepCosts, StepCurve
from verifier_service.step import Segment, Verdict


class CountingController(SpeculationController):
    looked = 0

    def plan(self, load: DecodeLoad) -> Order:
        self.looked += 1
        return super().plan(load)


@dataclass
class Place:
    """Drafts worth nothing, of sequences that step together."""

    controller: CountingController = field(
        default_factory=lambda: CountingController(StepCosts(StepCurve((1, 8, 16), (0.02, 0.05, 0.09))), 8)
    )

    def __post_init__(self) -> None:
        self.planner = planner_over(self.controller)
        self.sequences = [decoding_sequence(i) for i in range(4)]

    def step(self, ask: bool) -> int:
        """A step and its looks."""
        before, sequences = self.controller.looked, self.sequences
        if ask:
            useless = Draft.block([1, 2, 3], [-3.0, -3.0, -3.0])
            for s in sequences:
                s.pending = PendingDraft(1, 8, DraftShape.TREE, 0.0, True, useless)
            self.planner.budget(sequences, 0)
            self.planner.observe_wait([s.pending for s in sequences if s.pending], 0.02)
            for s in sequences:
                s.pending = None
        self.planner.orders(sequences, sequences)
        segments = [Segment(s, 1, [2], None, True, [1]) for s in sequences]
        self.planner.observe(segments, [Verdict([0], [3], []) for _ in sequences], 0.02, 0.02)
        return self.controller.looked - before


@pytest.fixture
def resting() -> Place:
    place = Place()
    for _ in range(60):
        place.step(ask=True)
    for _ in range(10):
        place.step(ask=False)
    assert place.controller.at_rest
    return place


def test_one_step_in_sixteen_is_looked_at_and_all_time_counts(resting: Place) -> None:
    before = resting.controller._busy
    assert sum(resting.step(ask=False) for _ in range(80)) == 5
    assert resting.controller._busy - before == pytest.approx(80 * 0.02)


def test_what_is_of_another_kind_is_looked_at_at_once(resting: Place) -> None:
    """Fewer sequences, one that steps in a fixed mode, a drafter that came."""

    def sleep() -> None:
        while not resting.step(ask=False):
            pass

    sleep()
    resting.sequences.pop()
    assert resting.step(ask=False)
    sleep()
    resting.sequences[0] = decoding_sequence(9, SpeculationMode.BLOCK)
    assert resting.sequences[0] in resting.planner.orders(resting.sequences, resting.sequences)
    resting.sequences[0] = decoding_sequence(10)
    sleep()
    resting.planner.drafter_changed()
    assert resting.step(ask=False)


def test_a_load_that_fell_is_looked_at_until_it_has_settled(resting: Place) -> None:
    """What was decided for four sequences need not hold for one."""
    del resting.sequences[1:]
    looks = [resting.step(ask=False) for _ in range(24)]
    assert all(looks[:8])
    assert sum(looks) < 16


def test_new_texts_are_looked_at_at_once_where_they_are_a_quarter(resting: Place) -> None:
    while not resting.step(ask=False):
        pass
    assert not resting.step(ask=False)
    resting.sequences[0] = decoding_sequence(11)
    assert resting.step(ask=False)
