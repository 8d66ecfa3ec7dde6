"""The capacities that steps are captured for. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kernels.step_tables import WORD_BITS


@dataclass(frozen=True, order=True)
class Bucket:
    """What a step holds at most."""

    rows: int
    sequences: int
    choosing: int
    """Rows that choose a token."""

    def __str__(self) -> str:
        return f"bucket of {self.rows} rows, {self.sequences} sequences"


@dataclass(frozen=True)
class BucketLimits:
    """What steps may be asked for."""

    rows: int
    """Of the largest bucket. Larger steps have none."""
    sequences: int
    nodes: int
    """Of a draft."""
    context: int
    """Positions that a sequence's rows may take, nodes included."""

    @property
    def words(self) -> int:
        """Of ancestor bits per row: the root needs none."""
        return max(1, -(-self.nodes // WORD_BITS))


def buckets_of(limits: BucketLimits, min_rows: int) -> list[Bucket]:
    """Largest first.

    Rows: powers of two from min_rows on, from 16 on what lies halfway too, so that a third of the rows is padding at
    worst. For each number of rows, one sequence (long attention is split over a GPU by the sequences that might be
    there), about the square root of the most, and the most: 39 buckets for 512 rows and 32 sequences, whatever the
    drafts. A sequence chooses after its last token and its nodes only, which bounds the rows the head is computed for:
    a prompt chunk alone has few.
    """
    ladder = {2**i for i in range(20)} | {3 * 2**i for i in range(3, 20)}
    rows_of = sorted(rows for rows in ladder | {limits.rows} if min_rows <= rows <= limits.rows) or [min_rows]
    some = 2 ** (limits.sequences.bit_length() // 2)
    buckets = {
        Bucket(rows, sequences, max(min_rows, min(rows, sequences * (1 + limits.nodes))))
        for rows in rows_of
        for sequences in (min(rows, most) for most in (1, some, limits.sequences))
    }
    return sorted(buckets, reverse=True)


def smallest_for(buckets: Sequence[Bucket], rows: int, sequences: int, choosing: int) -> Bucket | None:
    """Of buckets in ascending order the first that holds so many; None if none does."""
    return next((b for b in buckets if b.rows >= rows and b.sequences >= sequences and b.choosing >= choosing), None)
