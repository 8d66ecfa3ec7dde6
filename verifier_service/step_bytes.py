"""What a step of the target reads from memory, by the sizes of its weights and KV: computed, not measured."""

from collections.abc import Iterable
from dataclasses import dataclass

from verifier_service.step import Segment


@dataclass(frozen=True)
class StepBytes:
    """Bytes on all ranks. Routed experts are not in it: which of them a step reads depends on its rows."""

    weights: int
    """Read once per step, however many rows share it."""
    kv_token: int
    """Of one token's KV in all layers."""

    def kv(self, segments: Iterable[Segment]) -> int:
        """Each sequence's prefix once, whatever the number of its rows, and the rows' own."""
        return self.kv_token * sum(segment.start + segment.rows for segment in segments)
