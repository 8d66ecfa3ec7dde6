"""Figures from records of finished requests; pure arithmetic.

Definitions:
- tokens/s of a pass: ids received by all clients over the time from the first request's start to the last one's end.
- TTFT: from a request's start to its first message with ids.
- inter-token latency: the gap between successive messages with ids, divided by the ids of the later message and counted
  once for each of them, so that one-token steps and blocks compare (for one id per message it is vLLM's ITL).
- acceptance length: (drafts + accepted) / drafts, ids per step that verified a draft.
- acceptance rate: accepted / drafted.
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

    prompt_id: str
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
class Pass:
    """All requests of one mode over the prompts, `concurrency` at a time."""

    mode: str
    concurrency: int
    requests: tuple[Request, ...]

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
    """One mode at one concurrency, over all repeats."""

    mode: str
    concurrency: int
    tokens_per_second: float
    """Median of the passes."""
    tokens_per_second_of_passes: list[float]
    ratio_to_off: float | None
    """Median over the repeats of this pass's tokens/s by the off pass's beside it."""
    same_tokens_as_off: bool | None
    """Whether every request of every pass got the ids it got with speculation off."""
    acceptance_length: float | None
    acceptance_rate: float | None
    accepted_per_position: list[int]
    acceptance_per_position: list[float]
    """Entry k: share of drafts whose token at depth k + 1 was accepted."""
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
    """The result of one mode at one concurrency. `off`: the passes of mode off, repeat by repeat, or none."""
    requests = [request for p in passes for request in p.requests]
    drafts, accepted = sum(r.drafts for r in requests), sum(r.accepted_tokens for r in requests)
    drafted = sum(r.drafted_tokens for r in requests)
    per_position = [sum(column) for column in zip_longest(*(r.accepted_per_position for r in requests), fillvalue=0)]
    first_tokens = [(r.arrivals[0][0] - r.started) * 1e3 for r in requests if r.arrivals]
    gaps = [gap * 1e3 for r in requests for gap in inter_token_gaps(r.arrivals)]
    speeds = [p.tokens_per_second for p in passes]
    return Result(
        mode=passes[0].mode,
        concurrency=passes[0].concurrency,
        tokens_per_second=median(speeds),
        tokens_per_second_of_passes=speeds,
        ratio_to_off=median(a.tokens_per_second / b.tokens_per_second for a, b in zip(passes, off, strict=True))
        if off
        else None,
        same_tokens_as_off=all(_tokens(a) == _tokens(b) for a, b in zip(passes, off, strict=True)) if off else None,
        acceptance_length=(drafts + accepted) / drafts if drafts else None,
        acceptance_rate=accepted / drafted if drafted else None,
        accepted_per_position=per_position,
        acceptance_per_position=[count / drafts for count in per_position] if drafts else [],
        ttft_p50_ms=percentile(first_tokens, 50),
        ttft_p99_ms=percentile(first_tokens, 99),
        inter_token_p50_ms=percentile(gaps, 50) if gaps else None,
        inter_token_p99_ms=percentile(gaps, 99) if gaps else None,
        steps=sum(r.steps for r in requests),
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


def _tokens(of: Pass) -> dict[str, list[tuple[int, ...]]]:
    tokens: dict[str, list[tuple[int, ...]]] = {}
    for request in of.requests:
        tokens.setdefault(request.prompt_id, []).append(request.token_ids)
    return {prompt_id: sorted(sequences) for prompt_id, sequences in tokens.items()}
