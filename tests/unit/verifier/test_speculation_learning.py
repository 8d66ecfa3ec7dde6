"""The planner learns from every draft, from eight at a time once the controller knows enough to decide."""

from typing import Any

import numpy as np
import pytest

from tandem.draft_tree import Draft
from tandem.speculation import DraftShape
from tests.fakes.speculation_planners import decoding_sequence, planner_over
from verifier_service.sequence import PendingDraft
from verifier_service.speculation.controller import SpeculationController
from verifier_service.speculation.costs import StepCosts, StepCurve
from verifier_service.step import Segment, Verdict


class Learner:
    """One sequence whose drafts have 1 to 4 nodes, of which the walk accepts all but the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.controller = SpeculationController(StepCosts(StepCurve((1, 8, 16), (0.02, 0.021, 0.03))), 8)
        self.planner, self.sequence = planner_over(self.controller), decoding_sequence()
        self.lengths: list[int] = []
        self.batches: list[int] = []
        self.accepted = 0
        observe_drafts, observe = self.controller.observe_drafts, self.controller.calibration.observe

        def count_drafts(paths: Any, asked: np.ndarray, auto: np.ndarray) -> None:
            self.lengths += paths.lengths.tolist()
            self.batches.append(len(asked))
            observe_drafts(paths, asked, auto)

        def count_accepted(probabilities: Any, cells: Any, accepted: np.ndarray, *counts: int) -> None:
            self.accepted += int(accepted.sum())
            observe(probabilities, cells, accepted, *counts)

        monkeypatch.setattr(self.controller, "observe_drafts", count_drafts)
        monkeypatch.setattr(self.controller.calibration, "observe", count_accepted)

    def step(self, nodes: int) -> int:
        """Returns how many of the draft's nodes the walk accepted."""
        draft, sequence = Draft.block(list(range(1, nodes + 1)), [-0.05] * nodes), self.sequence
        sequence.pending = PendingDraft(1, 8, DraftShape.TREE, 0.0, True, draft)
        chosen = self.planner.budget([sequence], 0)[sequence]
        self.planner.observe_wait([sequence.pending], 0.001)
        sequence.pending = None
        self.planner.orders([sequence], [sequence])
        accepted = max(0, chosen - 1)
        verdict = Verdict(list(range(1 + accepted)), [9] * (1 + accepted), [])
        segment = Segment(sequence, 1, [2], draft.truncated(chosen) if chosen else None, True, [0])
        self.planner.observe([segment], [verdict], 0.021, 0.022)
        return accepted


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Learner:
    return Learner(monkeypatch)


def test_every_draft_counts_and_what_was_accepted_of_it(learner: Learner) -> None:
    given = [1 + i % 4 for i in range(160)]
    accepted = sum(learner.step(nodes) for nodes in given)
    assert learner.controller.informed
    assert learner.lengths == given
    assert learner.accepted == accepted > 0


def test_the_first_are_learned_from_at_once_and_later_ones_eight_at_a_time(learner: Learner) -> None:
    while not learner.controller.informed:
        learner.step(4)
    assert set(learner.batches) == {1}
    learner.batches.clear()
    for _ in range(31):
        learner.step(4)
    assert learner.batches == [8, 8, 8]


def test_drafts_of_a_drafter_that_is_replaced_teach_nothing_of_the_next(learner: Learner) -> None:
    while not learner.controller.informed:
        learner.step(4)
    learner.step(4)
    learner.planner.drafter_changed()
    learner.lengths.clear()
    learner.step(2)
    assert learner.lengths == [2]
