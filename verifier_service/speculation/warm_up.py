"""What steps cost, measured at start on the idle machine. No torch here: the model runner is driven from outside."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from verifier_service.kv_cache import PADDING_BLOCK
from verifier_service.sequence import Sequence, SequenceRequest
from verifier_service.speculation.costs import StepCurve
from verifier_service.step import Segment, StepResult

MeasureStep = Callable[[int, int, int], float]
"""(rows, sequences, context of each sequence) -> seconds of one step that verifies rows - sequences nodes."""

_CONTEXT = 64
_LONG_CONTEXT = 2048
_ROUNDS = 5
_MANY_SEQUENCES = 8


class Runner(Protocol):
    """What is driven."""

    def run(self, segments: list[Segment]) -> StepResult: ...


@dataclass(frozen=True)
class StepLimits:
    """The largest step worth measuring."""

    rows: int
    sequences: int
    kv_blocks: int
    """The padding block included."""
    block_tokens: int
    max_context: int
    capacities: tuple[int, ...] = ()
    """Rows of the steps that are captured, ascending: only those are worth measuring. Empty: any."""

    @property
    def context(self) -> int:
        """Longest context that one of _MANY_SEQUENCES sequences can have besides the rows of a step."""
        held = (self.kv_blocks - 1) // min(_MANY_SEQUENCES, self.sequences) * self.block_tokens
        return max(1, min(held, self.max_context) - self.rows)


def measure_steps(measure: MeasureStep, limits: StepLimits, seconds: float) -> StepCurve:
    """Steps of one sequence by rows, then what more sequences and a long context add, in about `seconds` seconds.

    The first round takes as many numbers of rows as half the time allows, two at least; further rounds over the same,
    the medians of which count, go as far as the rest does.
    """
    deadline = time.perf_counter() + seconds
    context = min(_CONTEXT, limits.context)
    found: dict[int, list[float]] = {}

    def time_alone(rows: int) -> float:
        # The largest capacity may be beyond the largest step.
        return measure(min(rows, limits.rows), 1, context)

    time_alone(1)
    for rows in _ladder(limits.rows, limits.capacities):
        if len(found) >= 2 and time.perf_counter() > deadline - seconds / 2:
            break
        time_alone(rows)
        found[rows] = [time_alone(rows)]
    many = min(_MANY_SEQUENCES, limits.sequences, max(found))
    long = min(_LONG_CONTEXT, limits.context)
    spread, far = [measure(many, many, context)], [measure(many, many, long)]
    for _ in range(_ROUNDS - 1):
        for rows, times in found.items():
            if time.perf_counter() > deadline:
                break
            times.append(time_alone(rows))
        if time.perf_counter() < deadline:
            spread.append(measure(many, many, context))
            far.append(measure(many, many, long))
    rows_measured = sorted(found)
    times = [median(found[rows]) for rows in rows_measured]
    # Noise makes some steps look faster than shorter ones: between the least and the most rise that allows.
    rising = (np.maximum.accumulate(times) + np.minimum.accumulate(times[::-1])[::-1]) / 2
    alone = float(np.interp(many, rows_measured, rising))
    per_sequence = max(0.0, median(spread) - alone) / max(1, many - 1)
    more_context = many * (long - context)
    per_token = max(0.0, median(far) - median(spread)) / more_context if more_context > 0 else 0.0
    return StepCurve(tuple(rows_measured), tuple(rising.tolist()), per_sequence, per_token, limits.capacities)


def timed_steps(runner: Runner, limits: StepLimits) -> MeasureStep:
    """Steps of the real runner. Their KV goes to blocks nobody holds yet."""

    def measure(rows: int, sequences: int, context: int) -> float:
        per_sequence = (limits.kv_blocks - 1) // sequences
        segments = []
        for i in range(sequences):
            nodes = rows // sequences + (i < rows % sequences) - 1
            first = PADDING_BLOCK + 1 + i * per_sequence
            sampling = SamplingParams(temperature=0.0)
            request = SequenceRequest("warm-up", [0] * (context + 1), context + 1, sampling, 1)
            sequence = Sequence.from_request(i, request)
            draft = Draft.block([0] * nodes, [0.0] * nodes) if nodes else None
            used = -(-(context + 1 + nodes) // limits.block_tokens)
            segments.append(Segment(sequence, context, [0], draft, True, list(range(first, first + used))))
        started = time.perf_counter()
        runner.run(segments)
        return time.perf_counter() - started

    return measure


def _ladder(most: int, capacities: tuple[int, ...]) -> list[int]:
    """1, 4, 16, ... up to `most`, then what lies between: what is measured while there is time spans a wide range. Of
    captured steps those whose capacity that is."""
    wide = [4**i for i in range(10)]
    between = sorted({2**i for i in range(20)} | {3 * 2**i for i in range(20)} | {most})
    if capacities:
        between = [c for below, c in zip((0, *capacities), capacities, strict=False) if below < most]
        wide = [next(c for c in between if c >= rows) for rows in wide if rows <= between[-1]]
        return list(dict.fromkeys(wide + between))
    return [rows for rows in dict.fromkeys(wide + between) if rows <= most]
