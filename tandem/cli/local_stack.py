"""A stack for the time of one command: quiet, unless it fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tandem.cli.console import errors
from tandem.cli.parts import Part, check_ports_free, parts_of
from tandem.cli.stack import Stack, StackFailed
from tandem.client import GenerationError
from tandem.config import load_config
from tandem.errors import StartupError

SHOWN_LINES = 20


@contextlib.asynccontextmanager
async def local_stack(config_path: Path) -> AsyncIterator[str]:
    """Runs the stack of a config file inside the block; gives the gateway's address.

    StartupError for a wrong config or a port in use, StackFailed as quiet_stack.
    """
    config = load_config(config_path)
    if config.gateway.tls:
        raise StartupError("gateway.tls: this command calls the stack that it starts in plain text")
    check_ports_free(config)
    parts = parts_of(config, config_path)
    async with quiet_stack(parts):
        yield next(part.address for part in parts if part.name == "gateway")


@contextlib.asynccontextmanager
async def quiet_stack(parts: Sequence[Part]) -> AsyncIterator[None]:
    """Runs parts inside the block. StackFailed if one ends; then the last lines of its log go to standard error."""
    logs: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=SHOWN_LINES))
    stack = Stack(parts, lambda part, line: logs[part].append(line))
    try:
        with errors.status(f"starting {', '.join(part.name for part in parts)}") as status:
            async with stack:
                status.stop()
                try:
                    yield
                except GenerationError:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1):
                            await stack.wait()  # a part that died is the better explanation
                    raise
    except StackFailed as error:
        name = next((part.name for part in parts if str(error).startswith(part.name)), "")
        for line in logs[name]:
            errors.print(f"{name} | {line}", markup=False)
        raise
