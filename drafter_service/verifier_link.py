"""The drafter's connection to its verifier: dials, registers, answers rounds, and starts over when the stream ends."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from drafter_service.messages import Answer, ProtocolError
from drafter_service.metrics import DrafterMetrics
from tandem.errors import StartupError
from tandem.rpc import channel_options
from tandem.speculation import Context, DraftRequest, DraftShape, Round
from tandem.tls import ClientFiles, open_channel
from tandem.v1 import speculation_pb2 as pb
from tandem.v1 import speculation_pb2_grpc

if TYPE_CHECKING:
    from tandem.tracing import Tracing

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_REGISTRATION_TIMEOUT_SECONDS = 10.0
_LEAVE_TIMEOUT_SECONDS = 1.0
_DTYPES = {pb.FEATURE_DTYPE_BFLOAT16: "bfloat16", pb.FEATURE_DTYPE_FLOAT32: "float32"}
_SHAPES = {
    pb.DRAFT_SHAPE_UNSPECIFIED: DraftShape.BLOCK,
    pb.DRAFT_SHAPE_BLOCK: DraftShape.BLOCK,
    pb.DRAFT_SHAPE_TREE: DraftShape.TREE,
}
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)

Inbox = asyncio.Queue[pb.VerifierMessage | None]
"""What came from the verifier; None is the stream's end."""


class RoundWorker(Protocol):
    """What does the work of one stream; see drafter_service.drafter.Drafter and ngram_drafter.NgramDrafter."""

    def work(self, rounds: list[Round]) -> Answer: ...


class _StreamEnded(Exception):
    """The stream is over; the message says why. `refused`: the verifier will not take this drafter as it is."""

    def __init__(self, reason: str, refused: bool = False):
        super().__init__(reason)
        self.refused = refused


class VerifierLink:
    """One drafter's link to one verifier, kept up until its task is cancelled."""

    def __init__(
        self,
        verifier: str,
        registration: pb.Registration,
        reconnect_max_seconds: float,
        new_worker: Callable[[str], RoundWorker],
        on_registered: Callable[[bool], Awaitable[None]],
        metrics: DrafterMetrics,
        tls: ClientFiles | None = None,
        tracing: "Tracing | None" = None,
    ):
        """new_worker is given the dtype of the features and makes the worker of one stream, which ends with it;
        on_registered is told when the verifier takes this drafter and when it is lost again."""
        self._verifier = verifier
        self._registration = registration
        self._reconnect_max_seconds = reconnect_max_seconds
        self._new_worker = new_worker
        self._on_registered = on_registered
        self._metrics = metrics
        self._tls = tls
        self._tracing = tracing
        if tls:
            tls.credentials()  # Fails here and now if they cannot be used.
        self._failures = 0
        """Streams that ended since work was last answered."""

    async def run(self) -> None:
        """Serve the verifier until cancelled; then the stream is left in order."""
        logged = ""
        while True:
            refused = False
            try:
                await self._serve_one_stream()
            except (_StreamEnded, StartupError) as error:
                reason, refused = str(error), isinstance(error, _StreamEnded) and error.refused
                if reason != logged or self._failures == 0:
                    log = logger.error if refused else logger.warning
                    log("verifier %s: %s; trying again until it works", self._verifier, reason)
                logged = reason
            except Exception:
                logger.exception("verifier %s: work failed; starting over with a new stream", self._verifier)
            self._failures += 1
            if refused:
                self._metrics.registrations_refused.inc()
            await asyncio.sleep(self._pause(refused))
            self._metrics.reconnects.inc()

    def _pause(self, refused: bool) -> float:
        """Seconds. Exponential, and jittered so that the drafters of a restarted verifier do not come all at once."""
        longest = self._reconnect_max_seconds
        pause = longest if refused else min(longest, _FIRST_PAUSE_SECONDS * 2 ** min(self._failures - 1, 20))
        return pause * random.uniform(0.5, 1.0)

    async def _serve_one_stream(self) -> None:
        """Raises _StreamEnded, StartupError if a replaced certificate cannot be used, or what the worker raised."""
        # A subchannel of its own: gRPC would hold attempts back by its schedule for the address, which is slower.
        options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
        async with open_channel(self._verifier, self._tls, options) as channel:
            call = speculation_pb2_grpc.SpeculationServiceStub(channel).Speculate()
            try:
                registered = await self._register(call)
                await self._serve_registered(call, registered)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                call.cancel()  # Without effect on a call that has ended, as it should have.
                code, details = await call.code(), await call.details()
                raise _StreamEnded(f"{code.name}: {details}", refused=code in _REFUSALS) from None

    async def _register(self, call: Any) -> pb.Registered:
        await call.write(pb.DrafterMessage(registration=self._registration))
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that comes at the same moment as the answer.
            async with asyncio.timeout(_REGISTRATION_TIMEOUT_SECONDS):
                message = await call.read()
        except TimeoutError:
            raise _StreamEnded(f"no answer to the registration within {_REGISTRATION_TIMEOUT_SECONDS:g}s") from None
        if message is grpc.aio.EOF:
            raise _StreamEnded("ended the stream without an answer to the registration")
        if message.WhichOneof("message") != "registered":
            raise _StreamEnded("protocol error: the first message must be `registered`")
        if message.registered.feature_dtype not in _DTYPES:
            number = message.registered.feature_dtype
            raise _StreamEnded(f"protocol error: registered.feature_dtype: {number} is unknown")
        return message.registered

    async def _serve_registered(self, call: Any, registered: pb.Registered) -> None:
        worker = self._new_worker(_DTYPES[registered.feature_dtype])
        inbox: Inbox = asyncio.Queue()
        reader = asyncio.create_task(_receive(call, inbox))
        logger.info("registered with %s at %s", registered.verifier_name or "the verifier", self._verifier)
        self._metrics.registered.set(1)
        await self._on_registered(True)
        try:
            await self._answer_rounds(call, inbox, worker)
            await reader
            raise _StreamEnded("ended the stream")
        except asyncio.CancelledError:
            await _leave(call, reader)
            raise
        finally:
            reader.cancel()
            self._metrics.registered.set(0)
            self._metrics.sequences.set(0)
            await self._on_registered(False)

    async def _answer_rounds(self, call: Any, inbox: Inbox, worker: RoundWorker) -> None:
        """Returns when the stream has ended.

        The work runs here, in the event loop: a thread would cost every draft two switches. Whatever arrives
        meanwhile joins the next batch.
        """
        while True:
            batch = [await inbox.get()]
            await asyncio.sleep(0)  # The reader delivers what arrived during the last forward.
            while not inbox.empty():
                batch.append(inbox.get_nowait())
            messages = [message for message in batch if message is not None]
            if messages:
                started = time.perf_counter()
                with _protocol_errors():
                    rounds = [_to_round(message) for message in messages]
                    answer = worker.work(rounds)
                if self._tracing:
                    _trace(self._tracing, rounds, answer, started)
                for reply in _to_messages(answer):
                    await call.write(reply)
                self._failures = 0
            if len(messages) < len(batch):
                return


async def _receive(call: Any, inbox: Inbox) -> None:
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            inbox.put_nowait(message)
    finally:
        inbox.put_nowait(None)


async def _leave(call: Any, reader: "asyncio.Task[None]") -> None:
    """Half-close, so that the verifier sees an orderly end, and wait for its side to end too."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.done_writing()
        await asyncio.wait([reader], timeout=_LEAVE_TIMEOUT_SECONDS)


def _trace(tracing: "Tracing", rounds: list[Round], answer: Answer, started: float) -> None:
    ended = time.perf_counter()
    nodes = {drafted.sequence_id: len(drafted.draft) for drafted in answer.drafts}
    for request in (request for round_ in rounds for request in round_.requests):
        if request.traceparent and request.sequence_id in nodes:
            tracing.drafted(request.traceparent, started, ended, nodes[request.sequence_id], len(nodes))


@contextlib.contextmanager
def _protocol_errors() -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise _StreamEnded(f"protocol error: {error}") from None


def _to_round(message: pb.VerifierMessage) -> Round:
    if message.WhichOneof("message") != "round":
        raise ProtocolError(f"message: expected a round, is {message.WhichOneof('message') or 'unset'}")
    work = message.round
    return Round(
        contexts=[
            Context(c.sequence_id, c.epoch, c.start_position, c.count, c.features, tuple(c.token_ids))
            for c in work.contexts
        ],
        requests=[
            DraftRequest(
                r.sequence_id, r.epoch, r.base_position, r.anchor, r.max_nodes, _to_shape(r.shape), r.traceparent
            )
            for r in work.requests
        ],
        released_sequence_ids=list(work.released_sequence_ids),
    )


def _to_shape(shape: "pb.DraftShape.ValueType") -> DraftShape:
    if shape not in _SHAPES:
        raise ProtocolError(f"requests.shape: {shape} is unknown")
    return _SHAPES[shape]


def _to_messages(answer: Answer) -> list[pb.DrafterMessage]:
    messages = [
        pb.DrafterMessage(gap=pb.ContextGap(sequence_id=g.sequence_id, epoch=g.epoch, held_positions=g.held_positions))
        for g in answer.gaps
    ]
    if answer.drafts:
        drafts = [
            pb.Draft(
                sequence_id=d.sequence_id,
                epoch=d.epoch,
                base_position=d.base_position,
                tokens=d.draft.tokens,
                parents=d.draft.parents,
                log_probs=d.draft.log_probs,
            )
            for d in answer.drafts
        ]
        batch = pb.DraftBatch(drafts=drafts, compute_us=answer.compute_us)
        messages.insert(0, pb.DrafterMessage(drafts=batch))
    return messages
