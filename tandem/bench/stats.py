"""Figures from records of finished requests; pure arithmetic.

Definitions:
- tokens/s of a pass: ids received by all clients over the time from the first request's start to the last one's end.
- TTFT: from a request's start to its first message with ids.
- inter-token latency: the gap between successive messages with ids, divided by the ids of the later message and counted
  once for each of them, so that one-token steps and blocks compare (for one id per message it is vLLM's ITL).
- acceptance length: (drafts + accepted) / drafts, ids per step that verified a draft.
- tokens per step: (steps + accepted) / steps, plain steps included: what mode auto makes of the two.
- acceptance rate: accepted / drafted.
- nodes per draft: drafted / drafts, draft tokens that a step verified, after the verifier cut the draft to its budget.
- a run: one pass of each mode, side by side. A ratio is taken within a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.client import StepTiming


@dataclass(frozen=True)
class Request:
    """One finished request as its client saw it. Times are seconds on one clock."""

    index: int
    """Place in the pass, and seed: the same in every pass."""
    prompt_id: str
    kind: str
    """Of the prompt: chat, code or maths."""
    started: float
    finished: float
    arrivals: tuple[tuple[float, int], ...]
    """(time, number of ids) of every message with ids."""
    token_ids: tuple[int, ...]
    steps: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    timings: tuple[StepTiming, ...]


@dataclass(frozen=True)
class Failure:
    """One request that failed."""

    index: int
    prompt_id: str
    reason: str


@dataclass(frozen=True)
class Pass:
    """All requests of one mode over the prompts, `concurrency` at a time; at least one succeeded."""

    mode: str
    concurrency: int
    run: int
    """Which alternation of the modes it belongs to, from 1 on."""
    requests: tuple[Request, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(r.finished for r in self.requests) - min(r.started for r in self.requests)

    @property
    def tokens(self) -> int:
        """Ids received."""
        return sum(len(r.token_ids) for r in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """Of all clients together."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Result:
    """One mode at one concurrency, over all runs."""

    mode: str
    concurrency: int
    tokens_per_second: float
    """Median of the runs."""
    tokens_per_second_of_runs: list[float]
    ratio_to_off: float | None
    """Median over the runs of this pass's tokens/s by the off pass's beside it."""
    ratios_to_off: list[float]
    """The same, run by run."""
    compared_requests: int
    """Requests that also ended with speculation off, in the same run."""
    differing_requests: int
    """Of those, how many got other ids."""
    failed_requests: int
    failures: list[str]
    """The reasons, each once."""
    acceptance_length: float | None
    acceptance_length_by_kind: dict[str, float]
    """Per kind of prompt; kinds of which nothing was drafted are left out."""
    tokens_per_step: float | None
    acceptance_rate: float | None
    accepted_per_position: list[int]
    acceptance_per_position: list[float]
    """Entry k: share of drafts whose token at depth k + 1 was accepted."""
    nodes_per_draft: float | None
    drafted_step_share: float | None
    """Steps that verified a draft by all steps."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    inter_token_p50_ms: float | None
    inter_token_p99_ms: float | None
    steps: int
    tokens: int
    requests: int
    seconds: float
    """Of all passes together."""


@dataclass(frozen=True)
class RoundCost:
    """Where a speculative round's time goes, medians in ms, beside a step of plain decoding."""

    mode: str
    concurrency: int
    rounds: int
    draft_ms: float
    transfer_ms: float
    verify_ms: float
    host_ms: float
    round_ms: float
    """Median of the sums."""
    plain_step_ms: float | None
    """Verify and host time of a step with speculation off."""
    round_in_plain_steps: float | None


def summarise(passes: Sequence[Pass], off: Sequence[Pass]) -> Result:
    """The result of one mode at one concurrency. `off`: the passes of mode off, or none; pairs are matched by run."""
    requests = [request for p in passes for request in p.requests]
    failures = [failure for p in passes for failure in p.failures]
    drafts, accepted = sum(r.drafts for r in requests), sum(r.accepted_tokens for r in requests)
    drafted, steps = sum(r.drafted_tokens for r in requests), sum(r.steps for r in requests)
    per_position = [sum(column) for column in zip_longest(*(r.accepted_per_position for r in requests), fillvalue=0)]
    first_tokens = [(r.arrivals[0][0] - r.started) * 1e3 for r in requests if r.arrivals]
    gaps = [gap * 1e3 for r in requests for gap in inter_token_gaps(r.arrivals)]
    speeds = [p.tokens_per_second for p in passes]
    off_of_run = {p.run: p for p in off}
    pairs = [(p, off_of_run[p.run]) for p in passes if p.run in off_of_run]
    ratios = [p.tokens_per_second / plain.tokens_per_second for p, plain in pairs]
    same = [ids == plain for pair in pairs for ids, plain in _in_both(*pair)]
    return Result(
        mode=passes[0].mode,
        concurrency=passes[0].concurrency,
        tokens_per_second=median(speeds),
        tokens_per_second_of_runs=speeds,
        ratio_to_off=median(ratios) if ratios else None,
        ratios_to_off=ratios,
        compared_requests=len(same),
        differing_requests=same.count(False),
        failed_requests=len(failures),
        failures=sorted({failure.reason for failure in failures}),
        acceptance_length=(drafts + accepted) / drafts if drafts else None,
        acceptance_length_by_kind=_acceptance_length_by_kind(requests),
        tokens_per_step=(steps + accepted) / steps if steps else None,
        acceptance_rate=accepted / drafted if drafted else None,
        accepted_per_position=per_position,
        acceptance_per_position=[count / drafts for count in per_position] if drafts else [],
        nodes_per_draft=drafted / drafts if drafts else None,
        drafted_step_share=drafts / steps if steps else None,
        ttft_p50_ms=percentile(first_tokens, 50),
        ttft_p99_ms=percentile(first_tokens, 99),
        inter_token_p50_ms=percentile(gaps, 50) if gaps else None,
        inter_token_p99_ms=percentile(gaps, 99) if gaps else None,
        steps=steps,
        tokens=sum(p.tokens for p in passes),
        requests=len(requests),
        seconds=sum(p.seconds for p in passes),
    )


def round_cost(passes: Sequence[Pass], off: Sequence[Pass]) -> RoundCost | None:
    """The cost of the drafted steps of `passes`, beside the plain steps of `off`; None if nothing was drafted."""
    rounds = [t for p in passes for r in p.requests for t in r.timings if t.drafted]
    if not rounds:
        return None
    plain = [t.verify_us + t.host_us for p in off for r in p.requests for t in r.timings if not t.drafted]
    whole = median(t.draft_us + t.transfer_us + t.verify_us + t.host_us for t in rounds)
    plain_step = median(plain) if plain else None
    return RoundCost(
        mode=passes[0].mode,
        concurrency=passes[0].concurrency,
        rounds=len(rounds),
        draft_ms=median(t.draft_us for t in rounds) / 1e3,
        transfer_ms=median(t.transfer_us for t in rounds) / 1e3,
        verify_ms=median(t.verify_us for t in rounds) / 1e3,
        host_ms=median(t.host_us for t in rounds) / 1e3,
        round_ms=whole / 1e3,
        plain_step_ms=plain_step / 1e3 if plain_step is not None else None,
        round_in_plain_steps=whole / plain_step if plain_step else None,
    )


def inter_token_gaps(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds per id, one entry for each id after the first message's."""
    return [(t - before) / count for (before, _), (t, count) in pairwise(arrivals) for _ in range(count)]


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between the ranks, as numpy's default."""
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def _in_both(a: Pass, b: Pass) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ids of every request that succeeded in both passes."""
    others = {request.index: request.token_ids for request in b.requests}
    return [(r.token_ids, others[r.index]) for r in a.requests if r.index in others]


def _acceptance_length_by_kind(requests: Sequence[Request]) -> dict[str, float]:
    lengths = {}
    for kind in dict.fromkeys(r.kind for r in requests):
        drafts = sum(r.drafts for r in requests if r.kind == kind)
        accepted = sum(r.accepted_tokens for r in requests if r.kind == kind)
        if drafts:
            lengths[kind] = (drafts + accepted) / drafts
    return dict(sorted(lengths.items()))
