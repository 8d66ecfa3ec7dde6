"""The draft that was verified last, for people. It is content of a request: kept only where the config says so."""

from dataclasses import dataclass

from tandem.draft_tree import Draft
from verifier_service.step import Segment, Verdict


@dataclass(frozen=True)
class VerifiedDraft:
    """A draft, and what the target took of it."""

    number: int
    """Drafts verified since start, with this one."""
    anchor: int
    """The newest token that was known: node 0."""
    draft: Draft
    accepted: list[int]
    """Indices of the accepted nodes, from the anchor's child on."""
    bonus: int
    """The target's choice behind the last of them."""
    verified_at: float
    """time.perf_counter()"""

    @classmethod
    def of(cls, number: int, segment: Segment, verdict: Verdict, verified_at: float) -> "VerifiedDraft":
        """Of a segment with a draft."""
        assert segment.draft
        known = len(segment.token_ids)
        accepted = [row - known + 1 for row in verdict.accepted_rows[known:]]
        return cls(number, segment.token_ids[-1], segment.draft, accepted, verdict.token_ids[-1], verified_at)
