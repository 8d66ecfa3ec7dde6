"""The supervisor: readiness, restarts, ends, and that no process outlives it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tandem.cli import stack as stack_module
from tandem.cli.parts import Part
from tandem.cli.stack import Stack, StackFailed
from tests.fakes.ports import free_port

FAKE = Path(__file__).parents[2] / "fakes" / "fake_part.py"


def fake_part(name: str, *options: str, essential: bool = True, grace: float = 10.0) -> Part:
    port = free_port()
    command = (sys.executable, str(FAKE), "--port", str(port), *options)
    return Part(name, command, f"127.0.0.1:{port}", ("fake",), grace, essential)


class Lines:
    """What each part wrote."""

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = defaultdict(list)

    def __call__(self, part: str, line: str) -> None:
        self.of[part].append(line)

    def values(self, part: str, key: str) -> list[str]:
        return [line.split()[-1] for line in self.of[part] if line.startswith(f"{key} ")]

    async def until(self, part: str, key: str, count: int) -> list[str]:
        async with asyncio.timeout(20):
            while len(found := self.values(part, key)) < count:
                await asyncio.sleep(0.02)
        return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(*pids: str) -> None:
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if alive(int(pid))]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


async def test_body_runs_once_every_part_serves_and_all_are_gone_after_it() -> None:
    lines = Lines()
    parts = [fake_part("verifier", "--serving-after", "0.7"), fake_part("gateway")]
    async with Stack(parts, lines):
        entered = time.monotonic()
        pids = lines.values("verifier", "pid") + lines.values("gateway", "pid")
        assert len(pids) == 2
        assert all(alive(int(pid)) for pid in pids)
        assert float(lines.values("verifier", "serving at")[0]) <= entered
    assert_gone(*pids)


async def test_parts_stop_gateway_first_verifier_last() -> None:
    lines = Lines()
    parts = [fake_part("verifier"), fake_part("drafter", essential=False), fake_part("gateway")]
    async with Stack(parts, lines):
        pass
    times = [float(lines.values(name, "sigterm at")[0]) for name in ("gateway", "drafter", "verifier")]
    assert times == sorted(times)


async def test_a_drafter_that_dies_is_started_again_and_the_stack_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "RESTART_FIRST_SECONDS", 0.1)
    lines = Lines()
    parts = [fake_part("verifier"), fake_part("drafter", essential=False)]
    async with Stack(parts, lines) as stack:
        waiting = asyncio.create_task(stack.wait())
        for generation in (1, 2):
            pids = await lines.until("drafter", "serving at", generation)
            os.kill(int(lines.values("drafter", "pid")[-1]), signal.SIGKILL)
        pids = await lines.until("drafter", "pid", 3)
        assert len(set(pids)) == 3
        assert not waiting.done()
        assert stack.failure is None
        waiting.cancel()
    assert_gone(*pids, *lines.values("verifier", "pid"))


async def test_stopping_during_a_restart_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "RESTART_FIRST_SECONDS", 0.0)
    lines = Lines()
    async with Stack([fake_part("drafter", essential=False)], lines):
        os.kill(int(lines.values("drafter", "pid")[0]), signal.SIGKILL)
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert_gone(*lines.values("drafter", "pid"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_end_of_an_essential_part_ends_the_stack_and_is_named(number: signal.Signals) -> None:
    lines = Lines()
    parts = [fake_part("verifier"), fake_part("gateway")]
    async with Stack(parts, lines) as stack, asyncio.timeout(20):
        os.kill(int(lines.values("verifier", "pid")[0]), number)
        with pytest.raises(StackFailed, match=r"^verifier ended (by SIGKILL|with code 0)$"):
            await stack.wait()
    assert_gone(*lines.values("verifier", "pid"), *lines.values("gateway", "pid"))


async def test_a_part_that_ends_before_ready_fails_the_start_even_the_drafter() -> None:
    lines = Lines()
    parts = [
        fake_part("verifier"),
        fake_part(
            "drafter", "--serving-after", "0.2", "--service", "x", "--die-after", "0", "--code", "2", essential=False
        ),
    ]
    with pytest.raises(StackFailed, match=r"^drafter ended with code 2 before the stack was ready$"):
        async with Stack(parts, lines):
            pytest.fail("entered")
    assert lines.of["drafter"][-1] == "dying"
    assert_gone(*lines.values("verifier", "pid"))


async def test_a_part_that_never_serves_times_out_by_name() -> None:
    lines = Lines()
    parts = [fake_part("verifier"), fake_part("gateway", "--serving-after", "600", grace=0.5)]
    with pytest.raises(StackFailed, match=r"^gateway: not serving after 2 s$"):
        async with Stack(parts, lines, ready_timeout_seconds=2):
            pytest.fail("entered")
    assert_gone(*lines.values("verifier", "pid"), *lines.values("gateway", "pid"))


async def test_a_part_that_ignores_sigterm_is_killed_after_its_grace_with_its_children() -> None:
    lines = Lines()
    async with Stack([fake_part("verifier", "--ignore-sigterm", "--grandchild", grace=0.3)], lines):
        stopping = time.monotonic()
    assert 0.3 <= time.monotonic() - stopping < 5
    assert lines.values("verifier", "sigterm at")
    assert_gone(*lines.values("verifier", "pid"), *lines.values("verifier", "grandchild"))


async def test_cancelling_the_stop_kills_at_once() -> None:
    lines = Lines()
    stack = Stack([fake_part("verifier", "--ignore-sigterm", grace=600)], lines)
    await stack.__aenter__()
    stopping = asyncio.create_task(stack.stop())
    await lines.until("verifier", "sigterm at", 1)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert_gone(*lines.values("verifier", "pid"))


SUPERVISOR = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from test_stack import fake_part
from tandem.cli.runner import Interrupted, run
from tandem.cli.stack import Stack
async def main():
    parts = [fake_part("verifier"), fake_part("drafter", essential=False), fake_part("gateway")]
    async with Stack(parts, lambda part, line: print(part, line, flush=True)) as stack:
        print("ready", flush=True)
        await stack.wait()
try:
    run(main())
except Interrupted as error:
    sys.exit(40 + error.number)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_part_outlives_its_supervisor_however_it_ends(number: signal.Signals) -> None:
    script = SUPERVISOR.format(tests=str(Path(__file__).parent))
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pids = []
    for line in supervisor.stdout:
        words = line.split()
        if words[1:2] == ["pid"]:
            pids.append(words[2])
        if words == ["ready"]:
            break
    assert len(pids) == 3
    supervisor.send_signal(number)
    code = supervisor.wait(timeout=30)
    assert code == (-9 if number == signal.SIGKILL else 40 + number)
    assert_gone(*pids)
    supervisor.stdout.close()
