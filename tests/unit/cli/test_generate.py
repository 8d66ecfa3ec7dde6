"""`tandem generate` against a gateway without a model."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tandem.cli.main import app
from tandem.v1 import generation_pb2 as pb
from tests.fakes.fake_gateway import FakeGateway


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as running:
        yield running


def ask(gateway: FakeGateway, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments, "--address", gateway.address], input=stdin)


def test_standard_output_holds_the_answer_and_nothing_else(gateway: FakeGateway) -> None:
    result = ask(gateway, "one two three", "--stats")
    assert result.exit_code == 0
    assert result.stdout == "one two three \n"
    assert "3 tokens" in result.stderr


def test_a_question_becomes_a_conversation_and_unset_options_stay_unset(gateway: FakeGateway) -> None:
    ask(gateway, "hello", "--system", "Be brief.")
    (request,) = gateway.requests
    assert [(m.role, m.content) for m in request.messages] == [("system", "Be brief."), ("user", "hello")]
    assert not request.HasField("prompt")
    assert request.sampling == pb.SamplingParams()
    assert not request.stopping.HasField("max_tokens")
    assert not request.stopping.HasField("ignore_eos")
    assert request.speculation_mode == pb.SPECULATION_MODE_UNSPECIFIED
    assert not request.HasField("max_draft_nodes")


def test_every_option_arrives_zero_included(gateway: FakeGateway) -> None:
    options = "--temperature 0 --top-p 0.5 --top-k 0 --min-p 0 --seed 0 --max-tokens 2 --stop x --stop y --ignore-eos"
    ask(gateway, "a b c", *options.split(), "--speculation-mode", "tree", "--max-draft-nodes", "5")
    (request,) = gateway.requests
    assert request.sampling == pb.SamplingParams(temperature=0, top_p=0.5, top_k=0, min_p=0, seed=0)
    assert request.stopping == pb.StoppingParams(max_tokens=2, stop_strings=["x", "y"], ignore_eos=True)
    assert (request.speculation_mode, request.max_draft_nodes) == (pb.SPECULATION_MODE_TREE, 5)


def test_raw_sends_the_text_as_it_is(gateway: FakeGateway) -> None:
    assert ask(gateway, "  once upon", "--raw").exit_code == 0
    (request,) = gateway.requests
    assert request.prompt == "  once upon"
    assert not request.messages
    assert ask(gateway, "x", "--raw", "--system", "y").exit_code == 2


def test_a_dash_reads_the_question_from_standard_input(gateway: FakeGateway) -> None:
    ask(gateway, "-", stdin="from a pipe\n")
    assert gateway.requests[0].messages[0].content == "from a pipe\n"


def test_stats_tell_acceptance(gateway: FakeGateway) -> None:
    result = ask(gateway, "a b c d e f g", "--speculation-mode", "block", "--stats")
    assert "2 drafted, acceptance length 3.00, accepted 4 of 14 (29%)" in " ".join(result.stderr.split())
    assert "none drafted" in ask(gateway, "a b c", "--speculation-mode", "off", "--stats").stderr


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("overloaded", ["RESOURCE_EXHAUSTED", "256 requests are running", "try again in 1.5 s"]),
        ("refused", ["INVALID_ARGUMENT", "sampling.top_p: must be in (0, 1], is 2"]),
        ("broken a b", ["UNAVAILABLE", "no verifier can be reached"]),
    ],
)
def test_errors_are_one_clear_line_and_exit_1(gateway: FakeGateway, question: str, told: list[str]) -> None:
    result = ask(gateway, question)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert all(text in line for text in told)


def test_no_gateway_is_one_clear_line_and_exit_1() -> None:
    started = time.monotonic()
    result = CliRunner().invoke(app, ["generate", "hello", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert time.monotonic() - started < 20
    (line,) = result.stderr.strip().splitlines()
    assert "UNAVAILABLE" in line


def test_ctrl_c_keeps_the_text_so_far_and_cancels_at_the_gateway(gateway: FakeGateway) -> None:
    command = [sys.executable, "-m", "tandem.cli.main", "generate", "slow", "--address", gateway.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(5) == "tick "
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert ("tick " + stdout).endswith("tick \n")
    assert stderr == ""
    assert gateway.cancelled.wait(5)


def test_client_commands_load_neither_torch_nor_transformers(gateway: FakeGateway) -> None:
    script = (
        "import sys; from tandem.cli.main import app\n"
        f"try: app(['generate', 'hi', '--address', '{gateway.address}'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_help_loads_no_grpc() -> None:
    """It is what people run first; gRPC alone would double its time."""
    script = (
        "import sys; from tandem.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 0


def test_wrong_tls_files_are_named(gateway: FakeGateway, tmp_path: Path) -> None:
    assert ask(gateway, "hello", "--tls-cert", "x", "--tls-key", "y").exit_code == 2
    result = ask(gateway, "hello", "--tls-ca", str(tmp_path / "ca.crt"))
    assert result.exit_code == 2
    assert "--tls.ca" in result.stderr
    assert "No such file" in result.stderr
