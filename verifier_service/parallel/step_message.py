"""A step as numbers: what rank 0 sends to the others before each step. Pure: knows no torch and no transport.

int32, in this order: the counts of moves, logit rows and segments; moves as (from, to) pairs; logit rows; then per
segment its id, start, counts of tokens, parents and blocks, and those three lists.
"""

from collections.abc import Callable
from itertools import chain

import numpy as np
import numpy.typing as npt

from verifier_service.step import RankStep, SegmentRows

Message = npt.NDArray[np.int32]


def pack(step: RankStep) -> Message:
    """One flat array."""
    numbers = [len(step.moves), len(step.logit_rows), len(step.segments), *chain(*step.moves), *step.logit_rows]
    for s in step.segments:
        numbers += [s.sequence_id, s.start, len(s.token_ids), len(s.parents), len(s.blocks)]
        numbers += s.token_ids
        numbers += s.parents
        numbers += s.blocks
    return np.array(numbers, dtype=np.int32)


def unpack(message: Message) -> RankStep:
    """The inverse of pack."""
    numbers = message.tolist()
    at = 0

    def take(count: int) -> list[int]:
        nonlocal at
        at += count
        return numbers[at - count : at]

    moves, logit_rows, segments = take(3)
    flat = take(2 * moves)
    return RankStep(
        moves=list(zip(flat[::2], flat[1::2], strict=True)),
        logit_rows=take(logit_rows),
        segments=[_segment(take) for _ in range(segments)],
    )


def _segment(take: Callable[[int], list[int]]) -> SegmentRows:
    sequence_id, start, tokens, parents, blocks = take(5)
    return SegmentRows(sequence_id, start, take(tokens), take(parents), take(blocks))
