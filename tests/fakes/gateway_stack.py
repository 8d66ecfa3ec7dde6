"""A gateway in this process, in front of a FakeVerifier."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gateway.app import Gateway
from tandem.client import AsyncClient
from tandem.config import StackConfig
from tandem.rpc import channel_options, check_health
from tandem.v1 import generation_pb2_grpc
from tests.fakes import tokenizers
from tests.fakes.fake_verifier import FakeVerifier

SERVICE = "tandem.v1.GenerationService"


@dataclass
class GatewayStack:
    verifier: FakeVerifier
    gateway: Gateway
    address: str
    client: AsyncClient
    stub: "generation_pb2_grpc.GenerationServiceAsyncStub"
    """For what the client would not send."""

    async def health(self) -> str:
        return await check_health(self.address, SERVICE)

    async def ready(self) -> None:
        while await self.health() != "SERVING":
            await asyncio.sleep(0.01)


async def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until a condition holds; AssertionError if it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def gateway_stack(
    verifier: FakeVerifier | None = None,
    generation_config: dict[str, Any] | None = None,
    write_target: Callable[..., object] = tokenizers.write_target,
    **section: Any,
) -> AsyncIterator[GatewayStack]:
    """A ready stack; `section` are keys of the config's `gateway:` section."""
    verifier = verifier or FakeVerifier()
    await verifier.start()
    with tempfile.TemporaryDirectory() as folder:
        write_target(Path(folder), **generation_config or {})
        section = {"listen": "127.0.0.1:0", "verifier": f"127.0.0.1:{verifier.port}", **section}
        config = StackConfig.model_validate({"target": folder, "gateway": section}, context={"base": Path(folder)})
        gateway = Gateway(config, poll_seconds=0.05)
    address = f"127.0.0.1:{gateway.port}"
    await gateway.start()
    try:
        async with (
            AsyncClient(address) as client,
            grpc.aio.insecure_channel(address, options=channel_options()) as channel,
        ):
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            stack = GatewayStack(verifier, gateway, address, client, stub)
            await asyncio.wait_for(stack.ready(), 5)
            yield stack
    finally:
        await gateway.stop()
        await verifier.stop()
