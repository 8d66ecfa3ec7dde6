"""`tandem bench` and `tandem demo` against a gateway without a model, whose figures are known."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.bench.load import Plan, steps_of
from tandem.cli import local_stack
from tandem.cli.main import app
from tandem.cli.parts import Part
from tandem.v1 import generation_pb2 as pb
from tests.fakes.fake_gateway import SERVICE, FakeGateway
from tests.unit.cli.test_stack import FAKE, free_port


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as running:
        yield running


def test_modes_alternate_and_flip_with_each_repeat_after_a_warm_up() -> None:
    plan = Plan(("off", "block"), (1, 4), prompts=2, max_tokens=8, temperature=0.0, repeats=2)
    order = [(step.concurrency, step.repeat, step.mode) for step in steps_of(plan)]
    one = [(0, "block"), (0, "off"), (1, "off"), (1, "block"), (2, "block"), (2, "off")]
    assert order == [(concurrency, *step) for concurrency in (1, 4) for step in one]


def bench(gateway: FakeGateway, path: Path, *options: str) -> dict[str, Any]:
    arguments = ["bench", "--address", gateway.address, "--prompts", "3", "--max-tokens", "10", "--json", str(path)]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def test_results_are_what_the_gateway_did(gateway: FakeGateway, tmp_path: Path) -> None:
    measured = bench(gateway, tmp_path / "bench.json", "--concurrency", "1,2", "--repeats", "2")
    results = {(r["concurrency"], r["mode"]): r for r in measured["results"]}
    assert list(results) == [(1, "off"), (1, "block"), (2, "off"), (2, "block")]
    for (_, mode), result in results.items():
        assert (result["requests"], result["tokens"]) == (6, 60)
        assert result["same_tokens_as_off"] is True
        assert result["machine"]
        assert result["ttft_p50_ms"] > 0
        assert result["inter_token_p99_ms"] >= result["inter_token_p50_ms"] > 0
        if mode == "off":
            assert result["acceptance_length"] is result["acceptance_rate"] is None
            assert result["ratio_to_off"] == 1.0
        else:  # 10 ids: one, then 3 drafted messages of 3
            assert result["acceptance_length"] == 3.0
            assert result["acceptance_rate"] == pytest.approx(2 / 7)
            assert result["accepted_per_position"] == [18, 18]
            assert result["ratio_to_off"] > 1.5
    (cost,) = measured["rounds"]
    assert (cost["draft_ms"], cost["transfer_ms"], cost["verify_ms"], cost["host_ms"]) == (4.0, 1.0, 12.0, 1.0)
    assert cost["round_in_plain_steps"] == pytest.approx(1.8)
    assert {"machine", "versions", "config", "model", "plan"} <= measured.keys()


def test_every_mode_gets_the_same_prompts_seeds_and_natural_ends(gateway: FakeGateway, tmp_path: Path) -> None:
    bench(gateway, tmp_path / "bench.json", "--concurrency", "1", "--repeats", "1", "--temperature", "0.5")
    sent: dict[int, list[object]] = {}
    for request in gateway.requests:
        assert request.sampling.temperature == 0.5
        assert not request.stopping.ignore_eos
        key = (request.stopping.max_tokens, request.sampling.seed, str(request.messages))
        sent.setdefault(request.speculation_mode, []).append(key)
    assert sent[pb.SPECULATION_MODE_OFF] == sent[pb.SPECULATION_MODE_BLOCK]
    assert len(set(sent[pb.SPECULATION_MODE_OFF])) == 3  # warm-up and measured pass alike, at 10 tokens both


def test_outputs_that_differ_between_modes_are_told(gateway: FakeGateway, tmp_path: Path) -> None:
    def drift(request: Any, reply: Any) -> None:
        if request.speculation_mode == pb.SPECULATION_MODE_BLOCK:
            reply.token_ids[0] += 1

    gateway.before_reply = drift
    measured = bench(gateway, tmp_path / "bench.json", "--concurrency", "1", "--repeats", "1")
    assert [r["same_tokens_as_off"] for r in measured["results"]] == [True, False]


def test_a_failed_request_ends_the_bench_with_its_reason(gateway: FakeGateway) -> None:
    def refuse(request: Any) -> None:
        request.messages[-1].content = "overloaded"

    gateway.before_generate = refuse
    result = CliRunner().invoke(app, ["bench", "--address", gateway.address, "--concurrency", "4"])
    assert result.exit_code == 1
    assert "RESOURCE_EXHAUSTED" in result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--modes", "off,tree"], "--modes: 'tree'"),
        (["--concurrency", "1,zero"], "--concurrency: 'zero'"),
        (["--concurrency", "0"], "--concurrency: '0'"),
        (["--json", "/nowhere/bench.json"], "--json /nowhere/bench.json"),
        (["--address", "a:1", "--config", "b.yaml"], "exclude each other"),
        (["--config", "no-such.yaml"], "config no-such.yaml: No such file"),
    ],
)
def test_wrong_options_are_named_before_anything_runs(options: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_mode_that_the_stack_does_not_serve_is_named() -> None:
    with FakeGateway(modes=("off",)) as gateway:
        result = CliRunner().invoke(app, ["bench", "--address", gateway.address])
    assert result.exit_code == 2
    assert "--modes block: the stack at" in result.stderr


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config whose stack is a fake gateway and a fake verifier."""
    port, other = free_port(), free_port()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    path = tmp_path / "stack.yaml"
    path.write_text(
        f"target: target\ngateway: {{listen: '127.0.0.1:{port}'}}\nverifier: {{listen: '127.0.0.1:{other}'}}\n"
    )
    parts = [
        Part("verifier", (sys.executable, str(FAKE), "--port", str(other)), f"127.0.0.1:{other}", ("fake",), 10),
        Part(
            "gateway",
            (sys.executable, "-m", "tests.fakes.fake_gateway", "--port", str(port)),
            f"127.0.0.1:{port}",
            (SERVICE,),
            10,
        ),
    ]
    monkeypatch.setattr(local_stack, "parts_of", lambda config, path: parts)
    return path


def children() -> set[str]:
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_demo_answers_compares_and_leaves_nothing_running(config: Path) -> None:
    before = children()
    result = CliRunner().invoke(app, ["demo", "--config", str(config), "--question", "why is the sky blue"])
    assert result.exit_code == 0, result.output
    assert children() == before
    assert "why is the sky blue \n" in result.stdout
    assert "every request got the same tokens in every mode" in result.stdout
    assert "a round costs 1.80 plain steps of 10.0 ms" in result.stdout
    for mode in ("off", "block"):
        assert mode in result.stdout


def test_demo_names_the_key_whose_port_is_taken(config: Path) -> None:
    port = int(config.read_text().split("127.0.0.1:")[1].split("'")[0])
    with FakeGateway(port):
        result = CliRunner().invoke(app, ["demo", "--config", str(config)])
    assert result.exit_code == 2
    assert f"gateway.listen: cannot listen on 127.0.0.1:{port}" in result.stderr


def test_bench_starts_and_stops_the_stack_of_a_config_and_records_it(config: Path, tmp_path: Path) -> None:
    options = ["--config", str(config), "--concurrency", "2", "--prompts", "2", "--repeats", "1"]
    result = CliRunner().invoke(app, ["bench", *options, "--json", str(tmp_path / "bench.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "bench.json").read_text())["config"]["target"] == "target"


def test_ctrl_c_during_a_bench_exits_130(gateway: FakeGateway) -> None:
    command = [sys.executable, "-m", "tandem.cli.main", "bench", "--address", gateway.address, "--repeats", "10000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not gateway.requests:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in stderr
