"""What one step did to one sequence, and what is told of it."""

from dataclasses import dataclass

from tandem.spans import DecodeStep
from tandem.step_timing import StepTiming
from verifier_service.sequence import PendingDraft
from verifier_service.step import Segment, StepPlan, StepResult, Verdict


@dataclass(frozen=True)
class Outcome:
    """Of a segment, after its verdict was taken over."""

    segment: Segment
    verdict: Verdict
    kept: int
    """Tokens emitted: the verdict's, up to the first that ends the sequence."""
    used: PendingDraft | None
    """The draft request the step used up."""

    def timing(self, result: StepResult, started: float, ended: float) -> StepTiming | None:
        """Where the time since the sequence's previous emission went; None for the prompt's own step.

        Asked once per step: the next counts from `ended` on.
        """
        sequence, used = self.segment.sequence, self.used
        previous, sequence.last_emission = sequence.last_emission, ended
        if previous is None or len(self.segment.token_ids) > 1:
            return None
        waited = started - used.requested_at if used else 0.0
        drafting = min(used.compute_us / 1e6, waited) if used else 0.0
        return StepTiming(
            draft_us=round(drafting * 1e6),
            transfer_us=round((waited - drafting) * 1e6),
            verify_us=round(result.forward_seconds * 1e6),
            host_us=max(0, round((ended - previous - waited - result.forward_seconds) * 1e6)),
            rows=result.rows,
            drafted=self.segment.nodes,
            accepted=min(len(self.verdict.token_ids) - 1, self.kept),
        )

    def tell(self, timing: StepTiming | None, plan: StepPlan, result: StepResult, started: float, ended: float) -> None:
        """Tell a traced sequence's spans of a step that emitted for it."""
        sequence = self.segment.sequence
        spans = sequence.request.spans
        assert spans
        if timing is None:
            spans.prefilled(ended, sequence.request.prompt_length, sequence.cached_prompt_tokens)
            return
        spans.stepped(
            DecodeStep(
                started=started,
                ended=ended,
                mode=sequence.request.speculation_mode.value,
                sequences=len(plan.segments),
                rows=sum(s.rows for s in plan.segments),
                bucket=result.rows,
                nodes=timing.drafted,
                accepted=timing.accepted,
                tokens=self.kept,
                asked=self.used is not None,
                draft_recorded=self.used is not None and self.used.span is not None,
            )
        )
