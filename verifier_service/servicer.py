"""VerifierService: protos to the engine and back."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc

from tandem import __version__
from tandem.errors import FieldViolation, InvalidRequest
from tandem.rpc import abort_with, domain_errors
from tandem.sampling import SamplingParams
from tandem.speculation import SpeculationMode
from tandem.v1 import generation_pb2, verification_pb2, verification_pb2_grpc
from verifier_service.engine import Emission, Engine
from verifier_service.last_draft import VerifiedDraft
from verifier_service.load import GraphBucket
from verifier_service.sequence import FinishReason, Sequence, SequenceRequest
from verifier_service.speculation.present import Present

if TYPE_CHECKING:
    from tandem.tracing import Tracing

_MODES = {
    SpeculationMode.OFF: generation_pb2.SPECULATION_MODE_OFF,
    SpeculationMode.BLOCK: generation_pb2.SPECULATION_MODE_BLOCK,
    SpeculationMode.TREE: generation_pb2.SPECULATION_MODE_TREE,
    SpeculationMode.AUTO: generation_pb2.SPECULATION_MODE_AUTO,
}
_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True)
class VerifierInfo:
    """What does not change while the verifier runs."""

    model: str
    max_context: int
    vocab_size: int
    eos_token_ids: list[int]
    speculation_modes: list[SpeculationMode]
    default_speculation_mode: SpeculationMode
    max_draft_nodes: int
    """0 without speculation."""
    dtype: str
    draft_model_fingerprint: str
    max_waiting_sequences: int
    shows_last_draft: bool


class VerifierServicer(verification_pb2_grpc.VerifierServiceServicer):
    """One call to Generate is one sequence."""

    def __init__(self, engine: Engine, info: VerifierInfo, tracing: "Tracing | None" = None):
        self._engine = engine
        self._info = info
        self._tracing = tracing

    async def Generate(  # noqa: N802
        self, request: verification_pb2.VerifierServiceGenerateRequest, context: Any
    ) -> AsyncIterator[verification_pb2.VerifierServiceGenerateResponse]:
        async with domain_errors(context):
            sequence_request = self._to_domain(request)
            trace = self._tracing.sequence(context.invocation_metadata()) if self._tracing else None
            if trace:
                sequence_request = replace(sequence_request, spans=trace)
            emissions: asyncio.Queue[Emission] = asyncio.Queue()
            self._engine.submit(sequence_request, _into(emissions))
            ended, sequence = False, None
            try:
                while not ended:
                    emission = await emissions.get()
                    sequence = emission.sequence
                    ended = bool(emission.error or emission.finish_reason)
                    if emission.error:
                        await self._fail(context, emission.error)
                    if emission.finish_reason is FinishReason.ABORTED:
                        await context.abort(grpc.StatusCode.CANCELLED, "aborted")
                    yield _to_proto(emission)
            finally:
                if not ended:
                    # The caller went away: its blocks are freed before the next step.
                    self._engine.abort(sequence_request.request_id)
                if trace:
                    trace.end(*_outcome(sequence))

    async def Abort(self, request: verification_pb2.AbortRequest, context: Any) -> verification_pb2.AbortResponse:  # noqa: N802
        for request_id in request.request_ids:
            self._engine.abort(request_id)
        return verification_pb2.AbortResponse()

    async def GetLoad(  # noqa: N802
        self, request: verification_pb2.GetLoadRequest, context: Any
    ) -> verification_pb2.GetLoadResponse:
        load = self._engine.load()
        return verification_pb2.GetLoadResponse(
            running_sequences=load.running,
            waiting_sequences=load.waiting,
            kv_blocks_used=load.kv_used,
            kv_blocks_cached=load.kv_cached,
            kv_blocks_total=load.kv_total,
            drafters=load.drafters,
            median_drafted_step=load.drafted_step.to_proto() if load.drafted_step else None,
            median_plain_step=load.plain_step.to_proto() if load.plain_step else None,
            emitted_tokens=load.totals.emitted,
            drafts=load.totals.drafts,
            drafted_tokens=load.totals.drafted,
            accepted_tokens=load.totals.accepted,
            speculation=_speculation(load.speculation) if self._info.max_draft_nodes else None,
            graph_buckets=map(_bucket, load.buckets),
            accepted_per_position=load.totals.accepted_per_position,
            drafter_names=load.drafter_names,
            last_draft=_verified(load.last_draft) if load.last_draft else None,
        )

    async def GetInfo(  # noqa: N802
        self, request: verification_pb2.GetInfoRequest, context: Any
    ) -> verification_pb2.GetInfoResponse:
        info = self._info
        return verification_pb2.GetInfoResponse(
            model=info.model,
            max_context=info.max_context,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            speculation_modes=[_MODES[mode] for mode in info.speculation_modes],
            default_speculation_mode=_MODES[info.default_speculation_mode],
            dtype=info.dtype,
            draft_model_fingerprint=info.draft_model_fingerprint,
            version=__version__,
            max_waiting_sequences=info.max_waiting_sequences,
            max_draft_nodes=info.max_draft_nodes,
            shows_last_draft=info.shows_last_draft,
        )

    async def _fail(self, context: Any, error: Exception) -> None:
        try:
            await abort_with(context, error)
        except TypeError:
            await context.abort(grpc.StatusCode.INTERNAL, f"verifier: the step failed: {error}")

    def _to_domain(self, request: verification_pb2.VerifierServiceGenerateRequest) -> SequenceRequest:
        info, found = self._info, []

        def check(ok: bool, field: str, reason: str) -> None:
            if not ok:
                found.append(FieldViolation(field, reason))

        tokens, vocab = list(request.token_ids), info.vocab_size
        check(bool(request.request_id), "request_id", "must not be empty")
        check(bool(tokens), "token_ids", "must not be empty")
        bad = next((i for i, t in enumerate(tokens) if t >= vocab), None)
        check(bad is None, f"token_ids[{bad}]", f"must be below {vocab}, is {tokens[bad] if bad is not None else ''}")
        check(
            1 <= request.prompt_length <= max(1, len(tokens)),
            "prompt_length",
            f"must be in [1, {len(tokens)}], is {request.prompt_length}",
        )
        room = info.max_context - request.prompt_length
        check(
            1 <= request.max_tokens <= room,
            "max_tokens",
            f"must be in [1, {room}]: the prompt has {request.prompt_length} tokens of {info.max_context}; "
            f"is {request.max_tokens}",
        )
        generated = len(tokens) - request.prompt_length
        check(
            generated < max(1, request.max_tokens),
            "token_ids",
            f"{generated} tokens are generated already, max_tokens is {request.max_tokens}",
        )
        mode = self._mode(request.speculation_mode)
        allowed = ", ".join(m.value for m in info.speculation_modes)
        is_now = mode.value if mode else f"{request.speculation_mode}, which is unknown"
        check(mode in info.speculation_modes, "speculation_mode", f"must be one of {allowed}, is {is_now}")
        nodes = request.max_draft_nodes if request.HasField("max_draft_nodes") else info.max_draft_nodes
        if request.HasField("max_draft_nodes"):
            check(
                1 <= nodes <= info.max_draft_nodes,
                "max_draft_nodes",
                f"must be in [1, {info.max_draft_nodes}], is {nodes}"
                if info.max_draft_nodes
                else f"must not be set: this verifier does not speculate; is {nodes}",
            )
        given = request.sampling
        sampling = SamplingParams(
            temperature=given.temperature if given.HasField("temperature") else 1.0,
            top_p=given.top_p if given.HasField("top_p") else 1.0,
            top_k=given.top_k,
            min_p=given.min_p,
            seed=given.seed,
        )
        check(given.HasField("seed") or sampling.greedy, "sampling.seed", "must be set while temperature is above 0")
        found += sampling.violations()
        if found or mode is None:
            raise InvalidRequest(*found)
        return SequenceRequest(
            request_id=request.request_id,
            token_ids=tokens,
            prompt_length=request.prompt_length,
            sampling=sampling,
            max_tokens=request.max_tokens,
            stop_token_ids=frozenset(request.stop_token_ids),
            speculation_mode=mode,
            max_draft_nodes=nodes,
            log_probs=request.return_log_probs,
        )

    def _mode(self, mode: int) -> SpeculationMode | None:
        if mode == generation_pb2.SPECULATION_MODE_UNSPECIFIED:
            return self._info.default_speculation_mode
        return next((name for name, value in _MODES.items() if value == mode), None)


def _speculation(present: Present) -> verification_pb2.SpeculationState:
    return verification_pb2.SpeculationState(
        mode=_MODES[present.mode],
        asked_nodes=present.nodes,
        reason=present.reason,
        gain=present.gain,
        expected_tokens=present.expected_tokens,
        draft_us=round(present.draft_seconds * 1e6),
        step_us=round(present.step_seconds * 1e6),
        plain_step_us=round(present.plain_step_seconds * 1e6),
        calibration_per_depth=present.calibration,
    )


def _bucket(bucket: GraphBucket) -> verification_pb2.GraphBucket:
    return verification_pb2.GraphBucket(
        rows=bucket.rows,
        sequences=bucket.sequences,
        captured=bucket.captured,
        reason=bucket.why,
        runs=bucket.runs,
        mean_us=round(bucket.seconds * 1e6),
    )


def _verified(last: VerifiedDraft) -> verification_pb2.VerifiedDraft:
    return verification_pb2.VerifiedDraft(
        number=last.number,
        anchor=last.anchor,
        tokens=last.draft.tokens,
        parents=last.draft.parents,
        log_probs=last.draft.log_probs,
        accepted_nodes=last.accepted,
        bonus=last.bonus,
        age_ms=round((time.perf_counter() - last.verified_at) * 1e3),
    )


def _outcome(sequence: Sequence | None) -> tuple[str, int]:
    """How a sequence ended, and the tokens it emitted."""
    reason = sequence.finish_reason if sequence else None
    return reason.value if reason else "abandoned", sequence.emitted if sequence else 0


def _into(queue: "asyncio.Queue[Emission]") -> Callable[[Emission], None]:
    """A sink that hands emissions from the engine's thread to this event loop."""
    loop = asyncio.get_running_loop()

    def sink(emission: Emission) -> None:
        # A closed loop means the process is ending: nobody is left to hear.
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, emission)

    return sink


def _to_proto(emission: Emission) -> verification_pb2.VerifierServiceGenerateResponse:
    return verification_pb2.VerifierServiceGenerateResponse(
        token_ids=emission.token_ids,
        log_probs=emission.log_probs,
        step_timing=emission.timing.to_proto() if emission.timing else None,
        cached_prompt_tokens=emission.sequence.cached_prompt_tokens,
        final=_final(emission.sequence) if emission.finish_reason else None,
    )


def _final(sequence: Sequence) -> verification_pb2.SequenceFinal:
    reason, counts = sequence.finish_reason, sequence.counts
    assert reason
    return verification_pb2.SequenceFinal(
        finish_reason=_FINISH_REASONS[reason],
        stop_token_id=sequence.tokens[-1] if reason is FinishReason.STOP else None,
        usage=generation_pb2.Usage(
            prompt_tokens=sequence.request.prompt_length,
            completion_tokens=sequence.emitted,
            cached_prompt_tokens=sequence.cached_prompt_tokens,
        ),
        speculation=generation_pb2.SpeculationStats(
            steps=counts.steps,
            drafts=counts.drafts,
            drafted_tokens=counts.drafted,
            accepted_tokens=counts.accepted,
            accepted_per_position=counts.accepted_per_position,
        ),
    )
