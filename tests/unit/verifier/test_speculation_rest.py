"""While drafts do not pay the planner looks at one step in four, and at every one that is of another kind."""

from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from tandem.speculation import DraftShape, SpeculationMode
from verifier_service.drafters import Drafter
from verifier_service.drafting import Drafting, DraftLimits
from verifier_service.kv_cache import KvCache
from verifier_service.metrics import VerifierMetrics
from verifier_service.sequence import PendingDraft, Sequence, SequenceRequest
from verifier_service.speculation.controller import DecodeLoad, Order, SpeculationController
from verifier_service.speculation.costs import StepCosts, StepCurve
from verifier_service.speculation.planner import SpeculationPlanner
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
        metrics = VerifierMetrics(CollectorRegistry())
        self.drafting = Drafting(DraftLimits(7, 0), KvCache(8, 16), lambda blocks, start, count: b"", metrics)
        self.planner = SpeculationPlanner(self.controller, self.drafting, metrics)
        self.drafter = Drafter("peer", lambda work: None)
        self.drafting.attach(self.drafter)
        self.sequences = [self.sequence(i) for i in range(4)]

    def sequence(self, number: int, mode: SpeculationMode = SpeculationMode.AUTO) -> Sequence:
        sampling = SamplingParams(temperature=0.0)
        request = SequenceRequest(f"r{number}", [1, 2], 2, sampling, 500, speculation_mode=mode)
        sequence = Sequence.from_request(number, request)
        sequence.committed = 1
        return sequence

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


def test_one_step_in_four_is_looked_at_and_all_time_counts(resting: Place) -> None:
    before = resting.controller._busy
    assert sum(resting.step(ask=False) for _ in range(40)) == 10
    assert resting.controller._busy - before == pytest.approx(40 * 0.02)


def test_what_is_of_another_kind_is_looked_at_at_once(resting: Place) -> None:
    """One sequence fewer, one that steps in a fixed mode, a drafter that came."""

    def sleep() -> None:
        while not resting.step(ask=False):
            pass

    sleep()
    resting.sequences.pop()
    assert resting.step(ask=False)
    sleep()
    resting.sequences[0] = resting.sequence(9, SpeculationMode.BLOCK)
    assert resting.sequences[0] in resting.planner.orders(resting.sequences, resting.sequences)
    resting.sequences[0] = resting.sequence(10)
    sleep()
    resting.planner.drafter_changed()
    assert resting.step(ask=False)
