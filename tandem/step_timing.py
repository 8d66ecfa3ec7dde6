"""Where the time of a verify step goes: the one shape in which verifier, gateway and clients speak of it."""

from dataclasses import dataclass

from tandem.v1 import generation_pb2


@dataclass(frozen=True)
class StepTiming:
    """Where the time between two emissions of a sequence went, microseconds."""

    draft_us: int
    """The drafter's own compute."""
    transfer_us: int
    """From asking for the draft to having it, less draft_us."""
    verify_us: int
    """The target's forward, shared by all sequences of the step."""
    host_us: int
    """The rest: sampling, acceptance, features, bookkeeping, other sequences' steps."""
    rows: int
    """Rows of the step, all sequences together."""
    drafted: int
    """Nodes verified for this sequence."""
    accepted: int
    """Of those, accepted."""

    @classmethod
    def from_proto(cls, proto: generation_pb2.StepTiming) -> "StepTiming":
        return cls(
            proto.draft_us,
            proto.transfer_us,
            proto.verify_us,
            proto.host_us,
            proto.rows,
            proto.drafted,
            proto.accepted,
        )

    def to_proto(self) -> generation_pb2.StepTiming:
        return generation_pb2.StepTiming(
            draft_us=self.draft_us,
            transfer_us=self.transfer_us,
            verify_us=self.verify_us,
            host_us=self.host_us,
            rows=self.rows,
            drafted=self.drafted,
            accepted=self.accepted,
        )
