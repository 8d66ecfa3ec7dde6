"""The verifier's loop: takes requests and drafts in, plans and runs steps, hands tokens and drafting work out.

One thread owns scheduler, KV and model: the one that calls run(). Everybody else talks to it through the other public
methods, which only queue a command and return. Results leave through sinks, which must not block. Knows no gRPC and no
torch.
"""

import contextlib
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from tandem.errors import Overloaded, Unavailable, invalid
from tandem.step_timing import StepTiming
from verifier_service.drafters import Drafter
from verifier_service.drafting import Drafting, DraftReply
from verifier_service.expert_load import ExpertLoad
from verifier_service.last_draft import VerifiedDraft
from verifier_service.load import GraphBucket, Load, RecentSteps, Totals
from verifier_service.metrics import VerifierMetrics
from verifier_service.outcome import Outcome
from verifier_service.scheduler import Scheduler
from verifier_service.sequence import FinishReason, PendingDraft, Sequence, SequenceRequest
from verifier_service.speculation.planner import SpeculationPlanner
from verifier_service.step import Segment, StepPlan, StepResult, Verdict
from verifier_service.step_bytes import StepBytes

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What the engine needs of the model runner."""

    def run(self, segments: list[Segment]) -> StepResult: ...


@dataclass(frozen=True)
class Emission:
    """What one step gave one sequence. A sequence's last emission has its finish reason or error."""

    sequence: Sequence
    token_ids: list[int]
    log_probs: list[float]
    timing: StepTiming | None = None
    """Of decode steps."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None


Sink = Callable[[Emission], None]


class Engine:
    """Runs sequences until stopped."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        drafting: Drafting,
        planner: SpeculationPlanner,
        metrics: VerifierMetrics,
        experts: ExpertLoad | None = None,
        sizes: StepBytes | None = None,
        buckets: Callable[[], list[GraphBucket]] = list,
        keep_last_draft: bool = False,
    ):
        """experts: counts what steps ask of them, for a target that has any. sizes: of what every step reads. buckets:
        the runner's, called from any thread. keep_last_draft: for load()."""
        self.experts = experts
        self._sizes = sizes
        self._buckets = buckets
        self._scheduler = scheduler
        self._runner = runner
        self._drafting = drafting
        self._planner = planner
        self._metrics = metrics
        self._sequences: dict[int, Sequence] = {}
        self._sinks: dict[int, Sink] = {}
        self._ids: dict[str, int] = {}
        self._next_id = 1
        self._recent = RecentSteps()
        self._asked_in = 0.0
        """Seconds that the asking took the engine."""
        self._free_since = 0.0
        """time.perf_counter() of the last step's end."""
        self._totals = Totals()
        self._keep_last_draft = keep_last_draft
        self._last_draft: VerifiedDraft | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running = True

    def run(self) -> None:
        """Run sequences until stop(). A fault of the loop itself, or a target that is Unavailable, ends all sequences
        with Unavailable and is raised."""
        try:
            while self._running:
                self._turn()
        except Unavailable as error:
            self._end_all(error)
            raise
        except Exception:
            self._end_all(Unavailable("verifier: internal fault, restarting"))
            raise

    def stop(self) -> None:
        """End all sequences with Unavailable and let run() return."""
        self._commands.put(self._stop)

    def fail(self, error: Unavailable) -> None:
        """The target is gone: end all sequences with this error and let run() raise it."""
        self._commands.put(lambda: _raise(error))

    def submit(self, request: SequenceRequest, sink: Sink) -> None:
        """Run a sequence. The sink is called in the engine's thread; the last emission has a finish reason or error."""
        self._commands.put(lambda: self._submit(request, sink))

    def abort(self, request_id: str) -> None:
        """End a sequence as ABORTED. Unknown ids are ignored."""
        self._commands.put(lambda: self._abort(request_id))

    def attach(self, drafter: Drafter) -> None:
        """A drafter registered: live sequences are drafted for from now on."""
        self._commands.put(lambda: self._attach(drafter))

    def detach(self, drafter: Drafter) -> None:
        """A drafter left: its sequences go on undrafted, or with another."""
        self._commands.put(lambda: self._drafting.detach(drafter, self._sequences))

    def deliver(self, drafter: Drafter, reply: DraftReply) -> None:
        """Drafts, already checked for shape and vocabulary."""
        self._commands.put(lambda: self._drafting.deliver(drafter, reply, self._sequences))

    def report_gap(self, drafter: Drafter, sequence_id: int, epoch: int, held: int) -> None:
        """A drafter lacks a sequence's features from position `held` on."""
        self._commands.put(lambda: self._report_gap(drafter, sequence_id, epoch, held))

    def load(self) -> Load:
        """Live figures; safe from any thread."""
        kv = self._scheduler.kv
        return Load(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_used=kv.used,
            kv_cached=kv.cached,
            kv_total=kv.total,
            drafters=len(self._drafting.pool),
            drafter_names=[drafter.name for drafter in self._drafting.pool.drafters],
            drafted_step=self._recent.median(drafted=True),
            plain_step=self._recent.median(drafted=False),
            totals=replace(self._totals, accepted_per_position=list(self._totals.accepted_per_position)),
            speculation=self._planner.present(),
            buckets=self._buckets(),
            last_draft=self._last_draft,
        )

    # Below: the engine's thread only.

    def _turn(self) -> None:
        """Take all commands, then one step, or sleep until there is something to do."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()
        if not self._running:
            return
        planned_at = time.perf_counter()
        plan = self._scheduler.plan(planned_at)
        for sequence in plan.preempted:
            logger.info("sequence %d preempted at %d tokens: no free KV block", sequence.id, len(sequence.tokens))
            self._metrics.preemptions.inc()
            self._drafting.restart(sequence)
        if plan.segments:
            self._step(plan, planned_at)
            return
        timeout = None if plan.wake_at is None else max(0.0, plan.wake_at - time.perf_counter())
        with contextlib.suppress(queue.Empty):
            self._commands.get(timeout=timeout)()

    def _step(self, plan: StepPlan, planned_at: float) -> None:
        started = time.perf_counter()
        self._observe_queue(plan.segments, started)
        try:
            result = self._runner.run(plan.segments)
        except Unavailable:
            raise
        except Exception as error:
            logger.exception("a step of %d sequences failed; they end", len(plan.segments))
            for segment in plan.segments:
                self._end(segment.sequence, FinishReason.FAILED, error)
            return
        outcomes = [self._commit(s, v) for s, v in zip(plan.segments, result.verdicts, strict=True)]
        ended = time.perf_counter()
        # Drafters work while the tokens are on their way to the gateway. The sleep hands the interpreter to the thread
        # that sends: without it the round leaves only when the emissions below are done (measured: 0.2 ms later).
        self._observe_wait([o.used for o in outcomes if o.used], planned_at)
        live = [s.sequence for s in plan.segments if s.sequence.finish_reason is None]
        self._drafting.ask(live, self._planner.orders(live, self._scheduler.running))
        time.sleep(0)
        self._asked_in = time.perf_counter() - ended
        for outcome in outcomes:
            if outcome.segment.samples:
                timing = outcome.timing(result, started, ended)
                if outcome.segment.sequence.request.spans:
                    outcome.tell(timing, plan, result, started, ended)
                self._emit(outcome, timing)
        before, self._free_since = self._free_since, time.perf_counter()
        seconds = self._free_since - planned_at - self._asked_in
        self._planner.observe(plan.segments, result.verdicts, seconds, self._free_since - before)
        self._count_step(plan, result, ended - started, sum(outcome.kept for outcome in outcomes))

    def _observe_queue(self, segments: list[Segment], now: float) -> None:
        for sequence in (s.sequence for s in segments):
            if sequence.queued_at is not None:
                self._metrics.queue_seconds.observe(now - sequence.queued_at)
                if spans := sequence.request.spans:
                    spans.queued(sequence.queued_at, now)
                sequence.queued_at = None

    def _observe_wait(self, used: list[PendingDraft], planned_at: float) -> None:
        """What the step's drafts cost it: asking for them, and the time without a step until they were there."""
        if used:
            self._planner.observe_wait(used, max(0.0, planned_at - self._free_since) + self._asked_in)

    def _commit(self, segment: Segment, verdict: Verdict) -> Outcome:
        """Take over what a step decided for a sequence."""
        sequence = segment.sequence
        sequence.committed += len(verdict.accepted_rows)
        kept = len(sequence.append(verdict.token_ids))
        committed = min(sequence.committed, len(sequence.tokens))
        self._scheduler.kv.commit(sequence.id, sequence.tokens, committed, sequence.request.speculates)
        used, sequence.pending = sequence.pending, None
        if used and used.draft is None:
            if used.span:
                used.span.end("late")
            self._drafting.gave_up(sequence)
        if sequence.finish_reason:
            self._scheduler.remove(sequence)
            self._drafting.forget(sequence)
        return Outcome(segment, verdict, kept, used)

    def _emit(self, outcome: Outcome, timing: StepTiming | None) -> None:
        sequence, verdict, kept = outcome.segment.sequence, outcome.verdict, outcome.kept
        self._totals.emitted += kept
        self._metrics.generation_tokens.inc(kept)
        if timing:
            self._recent.add(timing)
            draft = outcome.segment.draft
            depth = max(draft.depths) if draft else 0
            sequence.counts.count_step(timing.drafted, timing.accepted, depth)
            if timing.drafted:
                self._totals.count_draft(timing.drafted, timing.accepted)
                self._metrics.count_draft(timing.drafted, timing.accepted)
                if self._keep_last_draft:
                    now = time.perf_counter()
                    self._last_draft = VerifiedDraft.of(self._totals.drafts, outcome.segment, verdict, now)
        reason = sequence.finish_reason
        emission = Emission(sequence, verdict.token_ids[:kept], verdict.log_probs[:kept], timing, reason)
        if reason:
            self._retire(sequence, emission)
        else:
            self._sinks[sequence.id](emission)

    def _count_step(self, plan: StepPlan, result: StepResult, seconds: float, tokens: int) -> None:
        prefill = any(len(s.token_ids) > 1 for s in plan.segments)
        kind = "prefill" if prefill else "verify" if any(s.nodes for s in plan.segments) else "decode"
        self._metrics.steps.labels(kind).inc()
        self._metrics.step_rows.labels(kind).inc(result.rows)
        self._metrics.step_tokens.labels(kind).inc(tokens)
        self._metrics.step_seconds.labels(kind).observe(seconds)
        self._metrics.verify_seconds.labels(kind).observe(result.forward_seconds)
        self._metrics.sequences_per_step.observe(len(plan.segments))
        if self._sizes:
            self._metrics.count_reads(kind, self._sizes.weights, self._sizes.kv(plan.segments))
        self._metrics.count_graph(result.rows, result.replay_seconds, result.fallback)
        if self.experts and result.routing is not None:
            self._metrics.count_experts(kind, self.experts.count(result.routing))

    def _submit(self, request: SequenceRequest, sink: Sink) -> None:
        sequence = Sequence.from_request(self._next_id, request)
        sequence.queued_at = time.perf_counter()
        self._next_id += 1
        if request.request_id in self._ids:
            error = invalid("request_id", f"{request.request_id!r} is already running")
            sink(Emission(sequence, [], [], error=error))
            return
        try:
            self._scheduler.add(sequence)
        except Overloaded as error:
            sink(Emission(sequence, [], [], error=error))
            return
        self._ids[request.request_id] = sequence.id
        self._sequences[sequence.id] = sequence
        self._sinks[sequence.id] = sink

    def _abort(self, request_id: str) -> None:
        sequence_id = self._ids.get(request_id)
        if sequence_id is not None:
            self._end(self._sequences[sequence_id], FinishReason.ABORTED, None)
            self._drafting.ask([], {})

    def _attach(self, drafter: Drafter) -> None:
        self._drafting.attach(drafter)
        self._planner.drafter_changed()

    def _report_gap(self, drafter: Drafter, sequence_id: int, epoch: int, held: int) -> None:
        sequence = self._drafting.gap(drafter, sequence_id, epoch, held, self._sequences)
        if sequence in self._scheduler.running:
            self._drafting.ask([sequence], {})

    def _stop(self) -> None:
        self._end_all(Unavailable("verifier: shutting down"))
        self._running = False

    def _end_all(self, error: Exception) -> None:
        for sequence in list(self._sequences.values()):
            self._end(sequence, FinishReason.FAILED, error)

    def _end(self, sequence: Sequence, reason: FinishReason, error: Exception | None) -> None:
        """End a sequence from outside a step's own verdict."""
        sequence.finish_reason = reason
        self._scheduler.remove(sequence)
        self._drafting.forget(sequence)
        self._retire(sequence, Emission(sequence, [], [], None, reason, error))

    def _retire(self, sequence: Sequence, last: Emission) -> None:
        """Hand out a sequence's last emission and forget it."""
        assert last.finish_reason
        self._metrics.requests.labels(last.finish_reason.value).inc()
        cached = sequence.cached_prompt_tokens
        self._metrics.prompt_tokens.labels("cached").inc(cached)
        self._metrics.prompt_tokens.labels("computed").inc(sequence.request.prompt_length - cached)
        del self._sequences[sequence.id], self._ids[sequence.request.request_id]
        self._sinks.pop(sequence.id)(last)


def _raise(error: Exception) -> None:
    raise error
