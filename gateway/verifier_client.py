"""The connection to the verifier: whether it is ready, what it says about itself, and single Generate calls."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.validation import TargetInfo
from tandem.errors import FieldViolation, InvalidRequest, Overloaded, StartupError, Unavailable
from tandem.rpc import channel_options, field_violations, retry_after_seconds
from tandem.sampling import SamplingParams
from tandem.spans import outgoing_metadata
from tandem.speculation_modes import mode_name, mode_number
from tandem.step_timing import StepTiming
from tandem.tls import ClientFiles, open_channel
from tandem.v1 import generation_pb2, verification_pb2, verification_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE = "tandem.v1.VerifierService"
POLL_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 2.0
RETIRED_CHANNEL_SECONDS = 3600.0
"""What calls in flight may take when the certificate that they were made with is replaced."""


class VerifierLost(RuntimeError):
    """The verifier went away, or could not be reached, during a call: the call may be made again."""


class VerifierFailed(RuntimeError):
    """The verifier ended a call in a way that should not happen."""


@dataclass(frozen=True)
class SequenceRequest:
    """A sequence to run: what stays the same however often it is submitted."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    speculation_mode: str
    max_draft_nodes: int | None
    log_probs: bool


@dataclass
class SpeculationCounts:
    """How speculation did."""

    steps: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, other: "SpeculationCounts") -> None:
        self.steps += other.steps
        self.drafts += other.drafts
        self.drafted_tokens += other.drafted_tokens
        self.accepted_tokens += other.accepted_tokens
        for depth, count in enumerate(other.accepted_per_position):
            self._at_least(depth + 1)
            self.accepted_per_position[depth] += count

    def add_step(self, drafted: int, accepted: int) -> None:
        """One decode step that verified `drafted` tokens and accepted `accepted` of them."""
        self.steps += 1
        self.drafts += drafted > 0
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self._at_least(accepted)
        for depth in range(accepted):
            self.accepted_per_position[depth] += 1

    def _at_least(self, depths: int) -> None:
        self.accepted_per_position += [0] * (depths - len(self.accepted_per_position))


@dataclass(frozen=True)
class SequenceEnd:
    """The verifier's view of a sequence's end."""

    stop_token_id: int | None
    """None if it ended by its length."""
    counts: SpeculationCounts
    cached_prompt_tokens: int


@dataclass(frozen=True)
class Emission:
    """What one step of the verifier emitted."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    timing: StepTiming | None
    cached_prompt_tokens: int | None
    end: SequenceEnd | None


class VerifierClient:
    """One verifier. `start` begins to watch it; calls may be made while it is ready."""

    def __init__(
        self,
        address: str,
        tokenizer_vocab_size: int,
        on_change: Callable[[bool], Awaitable[None]],
        poll_seconds: float = POLL_SECONDS,
        tls: ClientFiles | None = None,
    ):
        """StartupError if the files of `tls` cannot be used."""
        self.address = address
        self._tokenizer_vocab_size = tokenizer_vocab_size
        self._on_change = on_change
        self._poll_seconds = poll_seconds
        self._tls = tls
        self._retired: set[asyncio.Task[None]] = set()
        """Channels of certificates that were replaced, until their calls have ended."""
        self._connect()
        self._watcher: asyncio.Task[None] | None = None
        self.trouble = "not reached yet"
        """Why it is not ready; empty if it is."""
        self.ready = False
        self.target: TargetInfo | None = None
        """As last heard; kept while the verifier is away."""

    def start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Ends the calls in flight."""
        if self._watcher:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        for retired in self._retired:
            retired.cancel()
        await self._channel.close()

    def _connect(self) -> None:
        self._stamp = self._tls.stamp if self._tls else None
        self._channel = open_channel(self.address, self._tls, channel_options())
        self._stub = verification_pb2_grpc.VerifierServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def _renew_certificate(self) -> None:
        """New calls go by a new channel if files were replaced; those in flight end on the one they are on."""
        if self._tls is None or self._tls.stamp == self._stamp:
            return
        old = self._channel
        try:
            self._connect()
        except StartupError as error:
            logger.warning("%s; going on with the certificate from before", error)
            return
        logger.info("verifier %s: certificate replaced, connecting anew", self.address)
        retired = asyncio.create_task(old.close(RETIRED_CHANNEL_SECONDS))
        self._retired.add(retired)
        retired.add_done_callback(self._retired.discard)

    def require_ready(self) -> TargetInfo:
        """The target's description; Unavailable while no verifier serves."""
        if not self.ready or self.target is None:
            raise Unavailable(f"no verifier at {self.address}: {self.trouble}")
        return self.target

    async def load(self) -> verification_pb2.GetLoadResponse:
        """Live figures; Unavailable if the verifier does not answer."""
        try:
            return await self._stub.GetLoad(verification_pb2.GetLoadRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the verifier at {self.address} does not answer: {error.code().name}") from None

    async def generate(
        self, sequence: SequenceRequest, generated: Sequence[int], timeout: float | None
    ) -> AsyncGenerator[Emission, None]:
        """Run a sequence from where `generated` leaves off. Closing the iterator cancels the call.

        Raises VerifierLost, Overloaded, InvalidRequest, TimeoutError (after `timeout` seconds) or VerifierFailed.
        """
        request = _to_proto(sequence, generated)
        call = self._stub.Generate(request, timeout=timeout, metadata=outgoing_metadata.get())
        try:
            async for message in call:
                yield _emission(message)
                if message.HasField("final"):
                    return
        except grpc.aio.AioRpcError as error:
            raise _domain_error(error) from None
        finally:
            call.cancel()
        raise VerifierFailed("the verifier ended the stream without its final message")

    async def _watch(self) -> None:
        while True:
            self._renew_certificate()
            was_ready = self.ready
            trouble = await self._probe()
            self.ready = trouble is None
            if self.ready and not was_ready:
                assert self.target
                logger.info("verifier %s is ready: model=%s", self.address, self.target.model)
            elif trouble != self.trouble and trouble is not None:
                logger.warning("verifier %s is not ready: %s", self.address, trouble)
            self.trouble = trouble or ""
            if self.ready != was_ready:
                await self._on_change(self.ready)
            await asyncio.sleep(self._poll_seconds)

    async def _probe(self) -> str | None:
        """None if the verifier serves, or what is wrong."""
        try:
            health = await self._health.Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=PROBE_TIMEOUT_SECONDS
            )
            if health.status != health_pb2.HealthCheckResponse.SERVING:
                return f"it is {health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)}"
            info = await self._stub.GetInfo(verification_pb2.GetInfoRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        if info.vocab_size < self._tokenizer_vocab_size:
            return (
                f"its target {info.model!r} has {info.vocab_size} token ids, this gateway's tokenizer "
                f"{self._tokenizer_vocab_size}: the two are configured with different targets"
            )
        self.target = TargetInfo(
            model=info.model,
            max_context=info.max_context,
            vocab_size=info.vocab_size,
            eos_token_ids=tuple(info.eos_token_ids),
            speculation_modes=tuple(mode_name(mode) for mode in info.speculation_modes),
            default_speculation_mode=mode_name(info.default_speculation_mode),
            max_draft_nodes=info.max_draft_nodes,
            shows_last_draft=info.shows_last_draft,
        )
        return None


def _to_proto(sequence: SequenceRequest, generated: Sequence[int]) -> verification_pb2.VerifierServiceGenerateRequest:
    sampling = sequence.sampling
    return verification_pb2.VerifierServiceGenerateRequest(
        request_id=sequence.request_id,
        token_ids=[*sequence.prompt_ids, *generated],
        prompt_length=len(sequence.prompt_ids),
        sampling=generation_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
        max_tokens=sequence.max_tokens,
        stop_token_ids=sorted(sequence.stop_token_ids),
        speculation_mode=mode_number(sequence.speculation_mode),
        max_draft_nodes=sequence.max_draft_nodes,
        return_log_probs=sequence.log_probs,
    )


def _emission(message: verification_pb2.VerifierServiceGenerateResponse) -> Emission:
    timing, end = None, None
    if message.HasField("step_timing"):
        timing = StepTiming.from_proto(message.step_timing)
    if message.HasField("final"):
        final, s = message.final, message.final.speculation
        counts = SpeculationCounts(
            s.steps, s.drafts, s.drafted_tokens, s.accepted_tokens, list(s.accepted_per_position)
        )
        stopped = final.finish_reason == generation_pb2.FINISH_REASON_STOP
        end = SequenceEnd(final.stop_token_id if stopped else None, counts, final.usage.cached_prompt_tokens)
    cached = message.cached_prompt_tokens if message.HasField("cached_prompt_tokens") else None
    return Emission(message.token_ids, message.log_probs, timing, cached, end)


def _domain_error(error: grpc.aio.AioRpcError) -> Exception:
    code, details = error.code(), error.details() or ""
    match code:
        # CANCELLED that we did not ask for comes from a verifier that is ending.
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return VerifierLost(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(f"verifier: {details}", retry_after_seconds(error) or 1.0)
        case grpc.StatusCode.INVALID_ARGUMENT:
            violations = [FieldViolation(field, reason) for field, reason in field_violations(error)]
            return InvalidRequest(*violations or [FieldViolation("request", details)])
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimeoutError("the deadline passed")
    return VerifierFailed(f"verifier: {code.name}: {details}")
