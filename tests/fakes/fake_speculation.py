"""A SpeculationService that does what a test tells it, over real gRPC in this process.

async with FakeSpeculation() as fake:            # or FakeSpeculation(address) to come back at the same port
    stream = await fake.next_stream()            # a drafter has registered: stream.registration
    await stream.send(pb.Round(...))
    message = await stream.receive()
    await stream.end()                           # or fake.stop(): the verifier dies
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc

from tandem.rpc import server_options
from tandem.v1 import speculation_pb2 as pb
from tandem.v1 import speculation_pb2_grpc

_PATIENCE_SECONDS = 10.0


class FakeStream:
    """One drafter's stream, after its registration."""

    def __init__(self, registration: pb.Registration, context: Any):
        self.registration = registration
        self.half_closed = asyncio.Event()
        """The drafter ended its side in order."""
        self.ended = asyncio.Event()
        """The call is over, however."""
        self._context = context
        self._received: asyncio.Queue[pb.DrafterMessage] = asyncio.Queue()
        self._end: asyncio.Future[tuple[grpc.StatusCode, str]] = asyncio.get_running_loop().create_future()

    async def send(self, *rounds: pb.Round) -> None:
        """Rounds, one message each."""
        for work in rounds:
            await self._context.write(pb.VerifierMessage(round=work))

    async def send_message(self, message: pb.VerifierMessage) -> None:
        """Anything, for breaking the protocol."""
        await self._context.write(message)

    async def receive(self) -> pb.DrafterMessage:
        """The drafter's next message."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await self._received.get()

    async def drafts(self) -> pb.DraftBatch:
        """The drafter's next message, which must be drafts."""
        message = await self.receive()
        assert message.WhichOneof("message") == "drafts", message
        return message.drafts

    async def gap(self) -> pb.ContextGap:
        """The drafter's next message, which must be a gap."""
        message = await self.receive()
        assert message.WhichOneof("message") == "gap", message
        return message.gap

    async def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, details: str = "") -> None:
        """End the stream from the verifier's side."""
        self._end.set_result((code, details))
        await self.ended.wait()

    async def run(self, requests: AsyncIterator[pb.DrafterMessage]) -> None:
        """The servicer's part: receive until either side ends."""
        reader = asyncio.create_task(self._read(requests))
        try:
            await asyncio.wait({reader, self._end}, return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                code, details = self._end.result()
                if code is not grpc.StatusCode.OK:
                    await self._context.abort(code, details)
        finally:
            reader.cancel()
            self.ended.set()

    async def _read(self, requests: AsyncIterator[pb.DrafterMessage]) -> None:
        async for message in requests:
            self._received.put_nowait(message)
        if not self._context.cancelled():
            self.half_closed.set()


class FakeSpeculation(speculation_pb2_grpc.SpeculationServiceServicer):
    """The server. `refusal`: details of a FAILED_PRECONDITION that every registration gets while it is set."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        feature_dtype: pb.FeatureDtype = pb.FEATURE_DTYPE_FLOAT32,
        refusal: str | None = None,
    ):
        self.address = address
        self.refusal = refusal
        self.registrations: list[pb.Registration] = []
        """All that came, refused ones too."""
        self._feature_dtype = feature_dtype
        self._streams: asyncio.Queue[FakeStream] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=server_options())
        speculation_pb2_grpc.add_SpeculationServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Die: every stream breaks, the port is free."""
        if self._server:
            await self._server.stop(None)
            self._server = None

    async def next_stream(self) -> FakeStream:
        """The next registered drafter."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await self._streams.get()

    async def Speculate(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        first = await anext(request_iterator)
        assert first.WhichOneof("message") == "registration", first
        self.registrations.append(first.registration)
        if self.refusal is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        registered = pb.Registered(feature_dtype=self._feature_dtype, verifier_name="fake", max_context=512)
        await context.write(pb.VerifierMessage(registered=registered))
        stream = FakeStream(first.registration, context)
        self._streams.put_nowait(stream)
        await stream.run(request_iterator)
