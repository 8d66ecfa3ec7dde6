"""Drafts without nodes, as n-gram drafters give them where the text suggests nothing."""

from tandem.draft_tree import Draft
from tandem.speculation import DraftShape
from tests.fakes.speculation_planners import decoding_sequence, planner_over
from verifier_service.sequence import PendingDraft
from verifier_service.speculation.controller import SpeculationController
from verifier_service.speculation.costs import StepCosts, StepCurve
from verifier_service.step import Segment, Verdict


def test_they_count_as_drafts_that_add_nothing() -> None:
    """What a step is expected to emit is a mean over all drafts, not over those that had something to propose."""
    controller = SpeculationController(StepCosts(StepCurve((1, 8, 16), (0.02, 0.021, 0.03))), 8)
    planner, sequence = planner_over(controller), decoding_sequence()

    def expected_after(draft: Draft) -> float:
        for _ in range(150):
            sequence.pending = PendingDraft(1, 8, DraftShape.TREE, 0.0, True, draft)
            nodes = planner.budget([sequence], 0)
            assert nodes.get(sequence, 0) <= len(draft)
            sequence.pending = None
            planner.observe_wait([PendingDraft(1, 8, DraftShape.TREE, 0.0, True, draft)], 0.001)
            planner.orders([sequence], [sequence])
            accepted = len(draft.tokens)
            verdict = Verdict(list(range(1 + accepted)), [*draft.tokens, 5], [])
            planner.observe([Segment(sequence, 1, [2], draft or None, True, [0])], [verdict], 0.021, 0.022)
        return planner.present().expected_tokens

    assert expected_after(Draft.block([1, 2, 3, 4], [-0.05] * 4)) > 2.5
    assert expected_after(Draft([], [], [])) < 1.2
