"""Tandem's Python client, blocking and asynchronous.

    with tandem.Client("127.0.0.1:7600") as client:
        generation = client.generate([Message("user", "Hello!")], max_tokens=100)
        for chunk in generation:
            print(chunk.text, end="", flush=True)
        print(generation.final)

Every call raises GenerationError with the server's status; docs/api.md describes fields and errors.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from tandem.client_protos import (
    chunk_of,
    error_of,
    final_of,
    generate_request,
    model_of,
    open_session_request,
    session_of,
    tokenize_request,
)
from tandem.client_types import (
    Chunk,
    Final,
    GenerateOptions,
    GenerationError,
    Message,
    ModelInfo,
    Prompt,
    Session,
    SpeculationMode,
)
from tandem.rpc import channel_options
from tandem.step_timing import StepTiming
from tandem.tls import ClientFiles, open_channel
from tandem.v1 import generation_pb2, generation_pb2_grpc

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Chunk",
    "Client",
    "ClientFiles",
    "Final",
    "GenerateOptions",
    "Generation",
    "GenerationError",
    "Message",
    "ModelInfo",
    "Prompt",
    "Session",
    "SpeculationMode",
    "StepTiming",
]


class _Progress:
    """What a generation has streamed so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._cancelled = False
        self.token_ids: list[int] = []
        """All ids so far."""
        self.log_probs: list[float] = []
        """All log-probabilities so far, if asked for."""
        self._final: Final | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    @property
    def final(self) -> Final:
        """How it ended; GenerationError CANCELLED if it was cancelled before, RuntimeError if it has not ended yet."""
        if self._final is not None:
            return self._final
        if self._cancelled:
            raise GenerationError("CANCELLED", "the generation was cancelled")
        raise RuntimeError("the generation has not ended: iterate over it first")

    def _absorb(self, response: generation_pb2.GenerateResponse) -> Chunk | None:
        """The response's chunk, None if it only carries the end."""
        chunk = chunk_of(response)
        self._texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.log_probs += chunk.log_probs
        if response.HasField("final"):
            self._final = final_of(response.final)
        return chunk if chunk.text or chunk.token_ids or chunk.step_timing else None


class Generation(_Progress, Iterator[Chunk]):
    """A running generation: iterate over its chunks. After `cancel` the iteration just ends."""

    def __init__(self, call: Any):
        super().__init__()
        self._call = call

    def __next__(self) -> Chunk:
        while True:
            try:
                chunk = self._absorb(next(self._call))
            except grpc.RpcError as error:
                if self._cancelled and error.code() == grpc.StatusCode.CANCELLED:
                    raise StopIteration from None
                raise error_of(error) from None
            if chunk is not None:
                return chunk

    def cancel(self) -> None:
        """Stop it; the server frees what it holds."""
        self._cancelled = True
        self._call.cancel()

    def result(self) -> Final:
        """Read to the end. GenerationError if it failed or was cancelled."""
        for _ in self:
            pass
        return self.final


class Client:
    """A connection to a gateway; for use from several threads. Connects when first used."""

    def __init__(self, address: str, tls: ClientFiles | None = None):
        """`address` is HOST:PORT; `tls` calls it by TLS with the files as they are now: StartupError if they cannot be
        used."""
        if tls:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=channel_options())
        else:
            self._channel = grpc.insecure_channel(address, options=channel_options())
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and the generations on it."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Continue a prompt. `options` are the fields of GenerateOptions; timeout: seconds for the whole generation."""
        return Generation(self._stub.Generate(generate_request(prompt, options), timeout=timeout))

    def open_session(self, messages: Sequence[Message] = (), ttl_seconds: int | None = None) -> str:
        """Open a conversation that the gateway keeps, beginning with `messages`; returns its session_id."""
        request = open_session_request(messages, ttl_seconds)
        session_id: str = self._unary(self._stub.OpenSession, request).session_id
        return session_id

    def close_session(self, session_id: str) -> None:
        """Forget a session."""
        self._unary(self._stub.CloseSession, generation_pb2.CloseSessionRequest(session_id=session_id))

    def get_session(self, session_id: str) -> Session:
        """A session's history and state."""
        request = generation_pb2.GetSessionRequest(session_id=session_id)
        return session_of(self._unary(self._stub.GetSession, request))

    def tokenize(self, prompt: str | Sequence[Message], template_flags: Mapping[str, bool] | None = None) -> list[int]:
        """The token ids that `generate` would use for the prompt."""
        return list(self._unary(self._stub.Tokenize, tokenize_request(prompt, template_flags or {})).token_ids)

    def model(self) -> ModelInfo:
        """The served target, its limits and defaults."""
        return model_of(self._unary(self._stub.GetModel, generation_pb2.GetModelRequest()))

    def _unary(self, method: Any, request: Any) -> Any:
        try:
            return method(request)
        except grpc.RpcError as error:
            raise error_of(error) from None


class AsyncGeneration(_Progress, AsyncIterator[Chunk]):
    """A running generation: `async for` over its chunks. After `cancel` the iteration just ends."""

    def __init__(self, call: Any):
        super().__init__()
        self._call = call
        self._responses = aiter(call)

    async def __anext__(self) -> Chunk:
        while True:
            try:
                chunk = self._absorb(await anext(self._responses))
            except grpc.aio.AioRpcError as error:
                raise error_of(error) from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._cancelled and task is not None and not task.cancelling():
                    raise StopAsyncIteration from None
                self._call.cancel()
                raise
            if chunk is not None:
                return chunk

    def cancel(self) -> None:
        """Stop it; the server frees what it holds."""
        self._cancelled = True
        self._call.cancel()

    async def result(self) -> Final:
        """Read to the end. GenerationError if it failed or was cancelled."""
        async for _ in self:
            pass
        return self.final


class AsyncClient:
    """A connection to a gateway, for one event loop. Connects when first used."""

    def __init__(self, address: str, tls: ClientFiles | None = None):
        """As Client."""
        self._channel = open_channel(address, tls, channel_options())
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection and the generations on it."""
        await self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGeneration:
        """As Client.generate; returns at once, errors come from the iteration."""
        return AsyncGeneration(self._stub.Generate(generate_request(prompt, options), timeout=timeout))

    async def open_session(self, messages: Sequence[Message] = (), ttl_seconds: int | None = None) -> str:
        """Open a conversation that the gateway keeps, beginning with `messages`; returns its session_id."""
        request = open_session_request(messages, ttl_seconds)
        session_id: str = (await self._unary(self._stub.OpenSession, request)).session_id
        return session_id

    async def close_session(self, session_id: str) -> None:
        """Forget a session."""
        await self._unary(self._stub.CloseSession, generation_pb2.CloseSessionRequest(session_id=session_id))

    async def get_session(self, session_id: str) -> Session:
        """A session's history and state."""
        request = generation_pb2.GetSessionRequest(session_id=session_id)
        return session_of(await self._unary(self._stub.GetSession, request))

    async def tokenize(
        self, prompt: str | Sequence[Message], template_flags: Mapping[str, bool] | None = None
    ) -> list[int]:
        """The token ids that `generate` would use for the prompt."""
        return list((await self._unary(self._stub.Tokenize, tokenize_request(prompt, template_flags or {}))).token_ids)

    async def model(self) -> ModelInfo:
        """The served target, its limits and defaults."""
        return model_of(await self._unary(self._stub.GetModel, generation_pb2.GetModelRequest()))

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await method(request)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
