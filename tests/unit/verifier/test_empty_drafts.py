"""Drafts without nodes, as n-gram drafters give them where the text suggests nothing."""

from prometheus_client import CollectorRegistry

from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from tandem.speculation import DraftShape, SpeculationMode
from verifier_service.drafters import Drafter
from verifier_service.drafting import Drafting, DraftLimits
from verifier_service.kv_cache import KvCache
from verifier_service.metrics import VerifierMetrics
from verifier_service.sequence import PendingDraft, Sequence, SequenceRequest
from verifier_service.speculation.controller import SpeculationController
from verifier_service.speculation.costs import StepCosts, StepCurve
from verifier_service.speculation.planner import SpeculationPlanner
from verifier_service.step import Segment, Verdict


def test_they_count_as_drafts_that_add_nothing() -> None:
    """What a step is expected to emit is a mean over all drafts, not over those that had something to propose."""
    metrics = VerifierMetrics(CollectorRegistry())
    drafting = Drafting(DraftLimits(7, 0), KvCache(8, 16), lambda blocks, start, count: b"", metrics)
    drafting.attach(Drafter("peer", lambda work: None))
    controller = SpeculationController(StepCosts(StepCurve((1, 8, 16), (0.02, 0.021, 0.03))), 8)
    planner = SpeculationPlanner(controller, drafting, metrics)
    request = SequenceRequest(
        "r", [1, 2], 2, SamplingParams(temperature=0.0), 500, speculation_mode=SpeculationMode.AUTO
    )
    sequence = Sequence.from_request(1, request)
    sequence.committed = 1

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
