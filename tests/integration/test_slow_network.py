"""A client that is far from its gateway, or whose gateway is busy."""

import asyncio
import contextlib

from tandem.client import AsyncClient
from tests.fakes.gateway_stack import gateway_stack

DELAY_SECONDS = 0.4
"""Of the first answer of a connection: several round trips of TLS between continents."""


async def test_a_slow_handshake_is_waited_for() -> None:
    """Rather than given up and begun again, which would fail calls that do not wait for a connection."""
    async with gateway_stack() as stack:
        host, _, port = stack.address.rpartition(":")

        async def delayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
                with contextlib.closing(far_writer):
                    await asyncio.sleep(DELAY_SECONDS)
                    await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

        proxy = await asyncio.start_server(delayed, "127.0.0.1", 0)
        async with AsyncClient(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}") as client:
            assert (await client.generate("hello", max_tokens=5, seed=1).result()).completion_tokens == 5
        proxy.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()
