"""A peer as a process that answers one request at a time, and waits without work while others are measured."""

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any

from tandem.bench.peers.comparison import Answer
from tandem.errors import StartupError

START_SECONDS = 300.0
ANSWER_SECONDS = 600.0
SCRIPTS = Path(__file__).parent
_LINE_BYTES = 2**24
_THREADING = ("OMP_", "GOMP_", "KMP_", "MKL_", "GGML_", "OPENBLAS_")
"""Settings of how many threads there are and how they wait: a peer runs as it would by itself."""


class Child:
    """One running peer."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes], advice: str):
        """log: what it writes to standard error. advice: what to do where it lacks a package."""
        self.name = name
        self.about = ""
        """Its version and threads, once it has started."""
        self._process = process
        self._log = log
        self._advice = advice

    async def start(self) -> None:
        """Wait until it has loaded. StartupError with the end of what it wrote if it ends instead."""
        self.about = (await self._line(START_SECONDS))["about"]

    async def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        """Greedy. StartupError if it ends or hangs."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode() + b"\n")
        reply = await self._line(ANSWER_SECONDS)
        return Answer(tuple(reply["token_ids"]), reply["seconds"], reply["first_seconds"], 1)

    async def _line(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), seconds)
        except TimeoutError:
            raise StartupError(f"--against: {self.name}: no answer within {seconds:.0f} s") from None
        if line:
            return json.loads(line)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        advice = f"; {self._advice}" if said[-1].startswith("ModuleNotFoundError") else ""
        raise StartupError(f"--against: {self.name}: its process ended: {said[-1]}{advice}")


@contextlib.asynccontextmanager
async def child(name: str, python: str, script: Path, settings: dict[str, Any], advice: str) -> AsyncIterator[Child]:
    """A peer by its script, inside the block; it loads at once."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_THREADING)}
    command: Sequence[str] = (python, str(script), json.dumps(settings))
    pipe = asyncio.subprocess.PIPE
    with tempfile.TemporaryFile() as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=log, env=environment, limit=_LINE_BYTES
            )
        except OSError as error:
            raise StartupError(f"--against: {name}: {python}: {error.strerror}") from None
        try:
            yield Child(name, process, log, advice)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
