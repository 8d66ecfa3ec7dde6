"""`tandem up` as its own process, over parts without a model."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.test_stack import assert_gone

UP = """
import sys
from tandem.cli import parts
from tandem.cli.main import app
from tests.unit.cli.test_stack import fake_part
stack = [fake_part("verifier"), fake_part("drafter", essential=False), fake_part("gateway")]
parts.parts_of = lambda config, path, verifier_options: stack
app(["up", sys.argv[1]])
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "stack.yaml").write_text(
        "target: .\ngateway: {listen: '127.0.0.1:0'}\nverifier: {listen: '127.0.0.1:0'}"
    )
    return tmp_path / "stack.yaml"


def start(config: Path) -> tuple[subprocess.Popen[str], dict[str, str], list[str]]:
    """The running command, the pids of its parts, and its lines up to the hint that follows the ready line."""
    process = subprocess.Popen(
        [sys.executable, "-c", UP, str(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids, lines = {}, []
    for line in process.stdout:
        lines.append(line.rstrip())
        words = line.split()
        if words[1:3] == ["|", "pid"]:
            pids[words[0]] = words[3]
        if line.startswith("try:"):
            break
    return process, pids, lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_tells_when_all_serve_and_stops_all_when_told(config: Path, number: signal.Signals) -> None:
    process, pids, lines = start(config)
    assert pids.keys() == {"verifier", "drafter", "gateway"}
    (ready,) = [line for line in lines if line.startswith("ready: ")]
    gateway_address = ready.rpartition("gateway ")[2].split(",")[0]
    assert lines[-1].endswith(f"--address {gateway_address}")
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 0
    assert stdout.splitlines()[-1] == "stopped"
    assert "Traceback" not in stderr
    assert_gone(*pids.values())


def test_a_dead_verifier_ends_it_with_code_1_by_name(config: Path) -> None:
    process, pids, _ = start(config)
    subprocess.run(["kill", "-9", pids["verifier"]], check=True)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert stderr.splitlines()[-1] == "error: verifier ended by SIGKILL"
    assert_gone(*pids.values())


def test_a_wrong_config_is_exit_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cli.main", "up", str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: config {tmp_path / 'none.yaml'}: No such file or directory"]
