"""Planners with a drafter, and sequences to plan for."""

from prometheus_client import CollectorRegistry

from tandem.sampling import SamplingParams
from tandem.speculation import SpeculationMode
from verifier_service.drafters import Drafter
from verifier_service.drafting import Drafting, DraftLimits
from verifier_service.kv_cache import KvCache
from verifier_service.metrics import VerifierMetrics
from verifier_service.sequence import Sequence, SequenceRequest
from verifier_service.speculation.controller import SpeculationController
from verifier_service.speculation.planner import SpeculationPlanner


def planner_over(controller: SpeculationController) -> SpeculationPlanner:
    """Its drafter takes whatever it is sent."""
    metrics = VerifierMetrics(CollectorRegistry())
    drafting = Drafting(DraftLimits(7, 0), KvCache(8, 16), lambda blocks, start, count: b"", metrics)
    drafting.attach(Drafter("peer", lambda work: None))
    return SpeculationPlanner(controller, drafting, metrics)


def decoding_sequence(number: int = 1, mode: SpeculationMode = SpeculationMode.AUTO) -> Sequence:
    """Greedy, one token committed and one to go in."""
    sampling = SamplingParams(temperature=0.0)
    request = SequenceRequest(f"r{number}", [1, 2], 2, sampling, 500, speculation_mode=mode)
    sequence = Sequence.from_request(number, request)
    sequence.committed = 1
    return sequence
