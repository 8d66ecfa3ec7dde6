"""The bench's arithmetic, on records made by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.stats import Failure, Pass, Request, inter_token_gaps, percentile, round_cost, summarise
from tandem.client import StepTiming


def request(
    prompt_id: str = "a",
    *,
    index: int = 0,
    kind: str = "chat",
    started: float = 0.0,
    arrivals: tuple[tuple[float, int], ...] = ((0.5, 1), (1.0, 2), (2.0, 1)),
    token_ids: tuple[int, ...] = (1, 2, 3, 4),
    steps: int = 2,
    drafts: int = 0,
    drafted: int = 0,
    accepted: tuple[int, ...] = (),
    timings: tuple[StepTiming, ...] = (),
) -> Request:
    finished = arrivals[-1][0] if arrivals else started
    return Request(
        index=index,
        prompt_id=prompt_id,
        kind=kind,
        started=started,
        finished=finished,
        arrivals=arrivals,
        token_ids=token_ids,
        steps=steps,
        drafts=drafts,
        drafted_tokens=drafted,
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        timings=timings,
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


def test_a_gap_is_shared_by_the_ids_of_the_message_that_ends_it() -> None:
    assert inter_token_gaps([(1.0, 1), (1.5, 1), (2.1, 3)]) == pytest.approx([0.5, 0.2, 0.2, 0.2])
    assert inter_token_gaps([(1.0, 4)]) == []
    assert inter_token_gaps([]) == []


def test_speed_is_all_tokens_over_first_start_to_last_end() -> None:
    early = request("a", started=10.0, arrivals=((11.0, 2),), token_ids=(1, 2))
    late = request("b", started=12.0, arrivals=((14.0, 6),), token_ids=(1, 2, 3, 4, 5, 6))
    assert Pass("off", 2, 1, (early, late)).tokens_per_second == pytest.approx(8 / 4.0)


def passes(mode: str, seconds: list[float], **fields: object) -> list[Pass]:
    return [
        Pass(mode, 1, run + 1, (request(arrivals=((s / 2, 1), (s, 3)), **fields),))  # type: ignore[arg-type]
        for run, s in enumerate(seconds)
    ]


def test_ratio_is_the_median_of_passes_side_by_side_not_of_all() -> None:
    """A machine that slows down half-way slows both modes of a repeat: the ratio must not move."""
    off, block = passes("off", [2.0, 2.0, 8.0]), passes("block", [1.0, 1.0, 4.0])
    result = summarise(block, off)
    assert result.ratio_to_off == pytest.approx(2.0)
    assert result.tokens_per_second == pytest.approx(4.0)
    assert result.tokens_per_second_of_runs == pytest.approx([4.0, 4.0, 1.0])
    assert result.ratios_to_off == pytest.approx([2.0, 2.0, 2.0])
    assert summarise(off, off).ratio_to_off == 1.0
    assert summarise(block, []).ratio_to_off is None


def test_passes_are_compared_within_their_run_whatever_their_order() -> None:
    """A resumed measurement may hold runs in any order, and a run without mode off gives no ratio."""
    off, block = passes("off", [2.0, 4.0]), passes("block", [1.0, 1.0, 9.0])
    result = summarise(block, off[::-1])
    assert result.ratios_to_off == pytest.approx([2.0, 4.0])
    assert result.ratio_to_off == pytest.approx(3.0)


def test_acceptance_figures_follow_from_the_counts() -> None:
    one = request(kind="maths", steps=5, drafts=4, drafted=28, accepted=(3, 1))
    two = request(kind="chat", steps=3, drafts=1, drafted=7, accepted=(1, 1, 1))
    result = summarise([Pass("block", 1, 1, (one, two, request(kind="code")))], [])
    assert result.acceptance_length == pytest.approx((5 + 7) / 5)
    assert result.acceptance_length_by_kind == {"chat": pytest.approx(4.0), "maths": pytest.approx(2.0)}
    assert result.tokens_per_step == pytest.approx((10 + 7) / 10)
    assert result.nodes_per_draft == pytest.approx(7.0)
    assert result.drafted_step_share == pytest.approx(5 / 10)
    assert result.acceptance_rate == pytest.approx(7 / 35)
    assert result.accepted_per_position == [4, 2, 1]
    assert result.acceptance_per_position == pytest.approx([0.8, 0.4, 0.2])


def test_without_drafts_there_are_no_acceptance_figures() -> None:
    result = summarise(passes("off", [1.0]), [])
    assert result.acceptance_length is None
    assert result.acceptance_rate is result.nodes_per_draft is None
    assert result.acceptance_length_by_kind == {}
    assert result.acceptance_per_position == []


def test_latencies_are_of_all_requests_in_milliseconds() -> None:
    fast = request(started=0.0, arrivals=((0.1, 1), (0.2, 1)), token_ids=(1, 2))
    slow = request(started=0.0, arrivals=((0.3, 1), (0.7, 2)), token_ids=(1, 2, 3))
    result = summarise([Pass("off", 1, 1, (fast,)), Pass("off", 1, 2, (slow,))], [])
    assert (result.ttft_p50_ms, result.ttft_p99_ms) == pytest.approx((200.0, 298.0))
    assert result.inter_token_p50_ms == pytest.approx(200.0)
    assert (result.requests, result.tokens) == (2, 5)


def test_single_token_answers_have_no_inter_token_latency() -> None:
    result = summarise([Pass("off", 1, 1, (request(arrivals=((0.1, 1),), token_ids=(1,)),))], [])
    assert result.inter_token_p50_ms is None


def test_outputs_are_compared_request_by_request() -> None:
    """By their place in the pass; one that failed in either mode is not compared, but counted as failed."""
    a, b = request("a", index=0, token_ids=(1, 2)), request("b", index=1, token_ids=(3,))
    off = [Pass("off", 2, 1, (a, b))]

    def compared(*requests: Request, failures: tuple[Failure, ...] = ()) -> tuple[int, int, int]:
        result = summarise([Pass("block", 2, 1, requests, failures)], off)
        return result.compared_requests, result.differing_requests, result.failed_requests

    assert compared(b, a) == (2, 0, 0)
    assert compared(a, request("b", index=1, token_ids=(4,))) == (2, 1, 0)
    assert compared(a, failures=(Failure(1, "b", "UNAVAILABLE: gone"),)) == (1, 0, 1)
    assert summarise([Pass("block", 2, 1, (a, b))], []).compared_requests == 0


def timing(draft: int, transfer: int, verify: int, host: int, drafted: int) -> StepTiming:
    return StepTiming(draft, transfer, verify, host, drafted + 1, drafted, 0)


def test_a_round_costs_its_drafted_steps_in_units_of_mode_offs_steps() -> None:
    off = [Pass("off", 1, 1, (request(timings=(timing(0, 0, 9000, 1000, 0),)),))]
    drafted = (
        timing(4000, 1000, 12000, 2000, 7),
        timing(6000, 1000, 14000, 2000, 7),
        timing(5000, 900, 13000, 2100, 7),
    )
    undrafted = timing(0, 0, 50000, 0, 0)
    cost = round_cost([Pass("block", 1, 1, (request(timings=(*drafted, undrafted)),))], off)
    assert cost is not None
    assert cost.rounds == 3
    assert (cost.draft_ms, cost.transfer_ms, cost.verify_ms, cost.host_ms) == pytest.approx((5.0, 1.0, 13.0, 2.0))
    assert cost.round_ms == pytest.approx(21.0)
    assert cost.plain_step_ms == pytest.approx(10.0)
    assert cost.round_in_plain_steps == pytest.approx(2.1)


def test_no_round_cost_without_drafts_and_no_ratio_without_mode_off() -> None:
    assert round_cost(passes("block", [1.0]), []) is None
    cost = round_cost([Pass("block", 1, 1, (request(timings=(timing(1, 1, 1, 1, 3),)),))], [])
    assert cost is not None
    assert cost.round_in_plain_steps is None
