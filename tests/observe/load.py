"""The demo stack on other ports, and a load that makes everything happen that its dashboards look at."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import yaml

from tandem.cli.parts import parts_of
from tandem.cli.stack import Stack
from tandem.client import AsyncClient, GenerationError, Message
from tandem.config import load_config
from tandem.prompts import mixed_prompts

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "verifier", "drafter")


@contextlib.asynccontextmanager
async def running_stack(folder: Path, ports: list[int]) -> AsyncIterator[AsyncClient]:
    """configs/demo.yaml at ports[:3], metrics at ports[3:], with one thread per service."""
    config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    for key in ("target", "draft_model"):
        config[key] = str((ROOT / "configs" / config[key]).resolve())
    addresses = [f"127.0.0.1:{port}" for port in ports]
    for service, listen, metrics in zip(SERVICES, addresses[:3], addresses[3:], strict=True):
        config[service] |= {"listen": listen, "metrics_listen": metrics}
    for service in ("gateway", "drafter"):
        config[service]["verifier"] = addresses[1]
    config["verifier"] |= {"threads": 1, "warm_up_seconds": 1.0, "draft_timeout_ms": 2000}
    config["drafter"]["threads"] = 1
    path = folder / "stack.yaml"
    path.write_text(yaml.safe_dump(config))
    lines: list[str] = []
    stack = Stack(parts_of(load_config(path), path), lambda part, line: lines.append(f"{part} | {line}"))
    try:
        async with stack, AsyncClient(addresses[0]) as client:
            yield client
    except BaseException:
        print("\n".join(lines[-60:]))
        raise


async def load(client: AsyncClient, seconds: float) -> None:
    """Drafted and plain generations side by side and alone, prompts that come again, a session, an error."""
    until = time.monotonic() + seconds
    with contextlib.suppress(GenerationError):
        await _generate(client, 0, "off", max_tokens=0)

    async def keep_generating(mode: str, first: int) -> None:
        turn = first
        while time.monotonic() < until:
            await _generate(client, turn % 4, mode)
            turn += 1

    session = await client.open_session()
    # Alone first: steps that only verify and steps that only decode.
    for mode in ("tree", "off"):
        await _generate(client, 0, mode)
    await asyncio.gather(*(keep_generating(mode, i) for i, mode in enumerate(("auto", "auto", "tree", "off"))))
    await client.close_session(session)


async def _generate(client: AsyncClient, prompt: int, mode: str, max_tokens: int = 32) -> None:
    messages = [Message(turn.role, turn.content) for turn in mixed_prompts(4)[prompt].messages]
    async for _ in client.generate(messages, speculation_mode=mode, max_tokens=max_tokens):  # type: ignore[arg-type]
        pass
