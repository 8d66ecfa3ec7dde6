"""One child process: its own process group, its lines relayed, dead at the latest when this process is."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_DIE_WITH_PARENT = Path(__file__).parents[1] / "die_with_parent.py"


class Child:
    """A running command. Start it on the main thread: the kernel ties it to the life of the thread that starts it."""

    def __init__(
        self, process: asyncio.subprocess.Process, output: asyncio.ReadTransport, relay: asyncio.Task[None]
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._output = output
        self._relay = relay

    @classmethod
    async def start(cls, command: Sequence[str], on_line: Callable[[str], None]) -> "Child":
        """Run `command`; on_line gets each line of its stdout and stderr."""
        # A pipe of our own: asyncio's wait() lasts until all writers have closed its pipe, grandchildren included.
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(_DIE_WITH_PARENT),
                str(os.getpid()),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,  # a Ctrl-C in the terminal is for the parent alone
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        reader = asyncio.StreamReader()
        output, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
        )
        return cls(process, output, asyncio.create_task(_relay(reader, on_line)))

    async def wait(self) -> int:
        """The exit code, -N for signal N, after the last line was relayed and the whole process group is gone."""
        code = await self._process.wait()
        self.kill()
        await asyncio.wait([self._relay], timeout=1.0)
        self._output.close()
        self._relay.cancel()
        return code

    async def end(self, grace_seconds: float) -> bool:
        """SIGTERM, SIGKILL to the group after the grace; whether the grace was enough."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace_seconds)
            in_time = True
        except TimeoutError:
            in_time = False
        self.kill()
        await self.wait()
        return in_time

    def kill(self) -> None:
        """SIGKILL to the process group, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


async def _relay(reader: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    """By chunks, since StreamReader's own line reading fails on very long lines."""
    rest = b""
    while chunk := await reader.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            on_line(line.decode(errors="replace"))
    if rest:
        on_line(rest.decode(errors="replace"))
