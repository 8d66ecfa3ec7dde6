"""GenerationService: protos to the domain and back, errors to statuses."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

import grpc

from gateway.chat_template import Turn
from gateway.generation import GenerationEnd, Generator, Update
from gateway.metrics import GatewayMetrics
from gateway.request_attributes import end_attributes, request_attributes
from gateway.requests import GenerationRequest, SamplingChoice, StoppingChoice
from gateway.sessions import SessionBusy, SessionNotFound, Sessions
from gateway.tokenizer import TargetTokenizer
from gateway.verifier_client import VerifierClient, VerifierFailed
from tandem import __version__
from tandem.errors import InvalidRequest, Overloaded, Unavailable
from tandem.rpc import to_status
from tandem.sampling import SamplingParams
from tandem.speculation_modes import mode_name, mode_number
from tandem.v1 import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from tandem.tracing import Tracing

logger = logging.getLogger(__name__)


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """One call to Generate is one generation."""

    def __init__(
        self,
        generator: Generator,
        sessions: Sessions,
        tokenizer: TargetTokenizer,
        verifier: VerifierClient,
        default_sampling: SamplingParams,
        metrics: GatewayMetrics,
        tracing: "Tracing | None" = None,
    ):
        self._generator = generator
        self._sessions = sessions
        self._tokenizer = tokenizer
        self._verifier = verifier
        self._default_sampling = default_sampling
        self._metrics = metrics
        self._tracing = tracing

    # Not a generator: grpc would then raise a cancellation outside of it, and only write() here.
    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        # A cancellation ends here: the call is over, and during shutdown grpc would log a traceback for it.
        with contextlib.suppress(asyncio.CancelledError):
            async with self._call("Generate", context):
                if self._tracing:
                    await self._generate_traced(self._tracing, request, context)
                else:
                    await self._generate(request, context)

    async def _generate_traced(self, tracing: "Tracing", request: generation_pb2.GenerateRequest, context: Any) -> None:
        target = self._verifier.target
        operation = "chat" if request.messages else "text_completion"
        attributes = request_attributes(operation, target.model if target else "", request)
        name = f"{operation} {target.model}" if target else operation
        with tracing.request(context.invocation_metadata(), name, attributes) as span:
            span.set_attributes(end_attributes(await self._generate(request, context)))

    async def _generate(self, request: generation_pb2.GenerateRequest, context: Any) -> GenerationEnd:
        left = context.time_remaining()
        deadline = None if left is None else time.monotonic() + left

        async def send(update: Update) -> None:
            response = _response(update, request.return_step_timing)
            if response.ByteSize():
                await context.write(response)

        last = await self._generator.run(_generation_request(request), deadline, send)
        await send(last)
        assert last.end
        return last.end

    async def OpenSession(  # noqa: N802
        self, request: generation_pb2.OpenSessionRequest, context: Any
    ) -> generation_pb2.OpenSessionResponse:
        async with self._call("OpenSession", context):
            turns = _turns(request.messages)
            await self._generator.check_opening(turns)
            ttl_seconds = request.ttl_seconds if request.HasField("ttl_seconds") else None
            session = self._sessions.open(turns, ttl_seconds)
            return generation_pb2.OpenSessionResponse(session_id=session.session_id, expires_at=session.expires_at)

    async def CloseSession(  # noqa: N802
        self, request: generation_pb2.CloseSessionRequest, context: Any
    ) -> generation_pb2.CloseSessionResponse:
        async with self._call("CloseSession", context):
            self._sessions.close(request.session_id)
            return generation_pb2.CloseSessionResponse()

    async def GetSession(  # noqa: N802
        self, request: generation_pb2.GetSessionRequest, context: Any
    ) -> generation_pb2.GetSessionResponse:
        async with self._call("GetSession", context):
            session = self._sessions.get(request.session_id)
            return generation_pb2.GetSessionResponse(
                session_id=session.session_id,
                messages=[generation_pb2.ChatMessage(role=t.role, content=t.content) for t in session.turns],
                expires_at=session.expires_at,
                busy=session.busy,
            )

    async def Tokenize(  # noqa: N802
        self, request: generation_pb2.TokenizeRequest, context: Any
    ) -> generation_pb2.TokenizeResponse:
        async with self._call("Tokenize", context):
            prompt = request.prompt if request.HasField("prompt") else None
            ids = await self._generator.tokenize(prompt, _turns(request.messages), dict(request.template_flags))
            return generation_pb2.TokenizeResponse(token_ids=ids, tokens=map(self._tokenizer.spelling, ids))

    async def GetModel(  # noqa: N802
        self, request: generation_pb2.GetModelRequest, context: Any
    ) -> generation_pb2.GetModelResponse:
        async with self._call("GetModel", context):
            target, sampling = self._verifier.require_ready(), self._default_sampling
            return generation_pb2.GetModelResponse(
                model=target.model,
                max_context=target.max_context,
                vocab_size=target.vocab_size,
                eos_token_ids=target.eos_token_ids,
                default_sampling=generation_pb2.SamplingParams(
                    temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p
                ),
                default_speculation_mode=mode_number(target.default_speculation_mode),
                speculation_modes=map(mode_number, target.speculation_modes),
                drafters=(await self._verifier.load()).drafters,
                version=__version__,
                max_draft_nodes=target.max_draft_nodes,
            )

    @contextlib.asynccontextmanager
    async def _call(self, method: str, context: Any) -> AsyncIterator[None]:
        """Inside, errors end the call with their status; the call is counted by its status."""
        code = grpc.StatusCode.OK
        try:
            yield
        except asyncio.CancelledError:
            left = context.time_remaining()
            late = left is not None and left <= 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            status = _status(error)
            code = status.code
            await context.abort_with_status(status)
        finally:
            self._metrics.requests.labels(method, code.name).inc()


class _Status(grpc.Status):
    """A status without details."""

    def __init__(self, code: grpc.StatusCode, details: str):
        self.code, self.details, self.trailing_metadata = code, details, ()


def _status(error: Exception) -> grpc.Status:
    match error:
        case InvalidRequest() | Overloaded() | Unavailable():
            status: grpc.Status = to_status(error)
            return status
        case SessionNotFound():
            return _Status(grpc.StatusCode.NOT_FOUND, str(error))
        case SessionBusy():
            return _Status(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        case TimeoutError():
            return _Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
        case VerifierFailed():
            logger.error("a generation failed: %s", error)
            return _Status(grpc.StatusCode.INTERNAL, str(error))
    logger.exception("a call failed unexpectedly")
    return _Status(grpc.StatusCode.INTERNAL, f"the gateway failed: {type(error).__name__}; see its log")


def _turns(messages: Iterable[generation_pb2.ChatMessage]) -> tuple[Turn, ...]:
    return tuple(Turn(message.role, message.content) for message in messages)


def _generation_request(request: generation_pb2.GenerateRequest) -> GenerationRequest:
    sampling, stopping = request.sampling, request.stopping

    def field(message: Any, name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return GenerationRequest(
        prompt=field(request, "prompt"),
        messages=_turns(request.messages),
        token_ids=tuple(request.token_ids),
        session_id=field(request, "session_id"),
        sampling=SamplingChoice(
            temperature=field(sampling, "temperature"),
            top_p=field(sampling, "top_p"),
            top_k=field(sampling, "top_k"),
            min_p=field(sampling, "min_p"),
            seed=field(sampling, "seed"),
        ),
        stopping=StoppingChoice(
            max_tokens=field(stopping, "max_tokens"),
            stop_token_ids=tuple(stopping.stop_token_ids),
            stop_strings=tuple(stopping.stop_strings),
            ignore_eos=stopping.ignore_eos,
        ),
        speculation_mode=mode_name(request.speculation_mode),
        max_draft_nodes=field(request, "max_draft_nodes"),
        log_probs=request.return_log_probs,
        template_flags=dict(request.template_flags),
    )


def _response(update: Update, with_timing: bool) -> generation_pb2.GenerateResponse:
    piece = update.piece
    return generation_pb2.GenerateResponse(
        text=piece.text,
        token_ids=piece.token_ids,
        log_probs=piece.log_probs,
        step_timing=update.timing.to_proto() if update.timing and with_timing else None,
        final=_final(update.end) if update.end else None,
    )


def _final(end: GenerationEnd) -> generation_pb2.GenerationFinal:
    ending = end.ending
    final = generation_pb2.GenerationFinal(
        finish_reason=generation_pb2.FINISH_REASON_STOP if ending.stopped else generation_pb2.FINISH_REASON_LENGTH,
        usage=generation_pb2.Usage(
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_prompt_tokens=end.cached_prompt_tokens,
        ),
        speculation=generation_pb2.SpeculationStats(
            steps=end.counts.steps,
            drafts=end.counts.drafts,
            drafted_tokens=end.counts.drafted_tokens,
            accepted_tokens=end.counts.accepted_tokens,
            accepted_per_position=end.counts.accepted_per_position,
        ),
        seed=end.seed,
        time_to_first_token_seconds=end.time_to_first_token_seconds,
        total_seconds=end.total_seconds,
    )
    if ending.stop_string is not None:
        final.stop_string = ending.stop_string
    elif ending.stop_token_id is not None:
        final.stop_token_id = ending.stop_token_id
    return final
