"""A verifier of the real parts, served in the test's own process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry

from tandem.config import StackConfig
from tandem.rpc import Health, channel_options, server_options
from tandem.spans import start_tracing
from tandem.v1 import speculation_pb2_grpc, verification_pb2_grpc
from verifier_service.app import build
from verifier_service.engine import Engine
from verifier_service.servicer import VerifierServicer
from verifier_service.speculation_servicer import SpeculationInfo, SpeculationServicer


@dataclass(frozen=True)
class Served:
    """What is served, and a channel to it."""

    engine: Engine
    speculation: SpeculationInfo
    channel: grpc.aio.Channel
    address: str


@asynccontextmanager
async def served_verifier(config: StackConfig) -> AsyncIterator[Served]:
    """Serve until the end of the block."""
    tracing = start_tracing(config.tracing, "verifier")
    engine, info, speculation = build(config, CollectorRegistry())
    assert speculation
    server = grpc.aio.server(options=server_options())
    verification_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(engine, info, tracing), server)
    speculation_pb2_grpc.add_SpeculationServiceServicer_to_server(SpeculationServicer(engine, speculation), server)
    health = Health(server, ["tandem.v1.VerifierService"], with_reflection=False)
    port = server.add_insecure_port("127.0.0.1:0")
    running = asyncio.create_task(asyncio.to_thread(engine.run))
    await server.start()
    await health.set_ready(True)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            yield Served(engine, speculation, channel, f"127.0.0.1:{port}")
    finally:
        await server.stop(None)
        engine.stop()
        await running
        if tracing:
            await tracing.close()
