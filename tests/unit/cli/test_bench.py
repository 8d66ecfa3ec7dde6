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
from tandem.client import SpeculationMode
from tandem.prompts import load_prompts
from tandem.v1 import generation_pb2 as pb
from tests.fakes.fake_gateway import SERVICE, FakeGateway
from tests.fakes.ports import free_port
from tests.unit.cli.test_stack import FAKE


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as running:
        yield running


def plan_of(*modes: SpeculationMode, runs: int = 2) -> Plan:
    return Plan(modes, (1, 4), prompts=2, max_tokens=8, temperature=0.0, runs=runs, kinds=("chat",))


def test_modes_take_turns_and_each_run_begins_with_another_after_a_warm_up() -> None:
    """A machine that slows down while it measures must not favour a mode."""
    order = [(step.concurrency, step.run, step.mode) for step in steps_of(plan_of("off", "block", "auto"))]
    one = [(0, "off"), (0, "block"), (0, "auto"), (1, "block"), (1, "auto"), (1, "off")]
    one += [(2, "auto"), (2, "off"), (2, "block")]
    assert order == [(concurrency, *step) for concurrency in (1, 4) for step in one]


def test_finished_runs_are_left_out_and_a_concurrency_without_others_needs_no_warm_up() -> None:
    steps = steps_of(plan_of("off", "auto"), {(1, 1), (1, 2), (4, 1)})
    assert [(step.concurrency, step.run) for step in steps] == [(4, 0), (4, 0), (4, 2), (4, 2)]


def bench(gateway: FakeGateway, path: Path, *options: str) -> dict[str, Any]:
    arguments = ["bench", "--address", gateway.address, "--prompts", "3", "--max-tokens", "10", "--json", str(path)]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def test_results_are_what_the_gateway_did(gateway: FakeGateway, tmp_path: Path) -> None:
    measured = bench(gateway, tmp_path / "bench.json", "--concurrency", "1,2", "--runs", "2")
    results = {(r["concurrency"], r["mode"]): r for r in measured["results"]}
    assert list(results) == [(c, mode) for c in (1, 2) for mode in ("off", "block", "tree", "auto")]
    for (_, mode), result in results.items():
        assert (result["requests"], result["tokens"]) == (6, 60)
        assert (result["compared_requests"], result["differing_requests"], result["failed_requests"]) == (6, 0, 0)
        assert result["machine"]
        assert result["ttft_p50_ms"] > 0
        assert result["inter_token_p99_ms"] >= result["inter_token_p50_ms"] > 0
        if mode == "off":
            assert result["acceptance_length"] is result["acceptance_rate"] is None
            assert result["ratio_to_off"] == 1.0
        else:  # 10 ids: one, then 3 drafted messages of 3
            assert result["acceptance_length"] == 3.0
            assert result["acceptance_length_by_kind"] == {"chat": 3.0, "code": 3.0, "maths": 3.0}
            assert (result["nodes_per_draft"], result["acceptance_rate"]) == (7.0, pytest.approx(2 / 7))
            assert len(result["ratios_to_off"]) == 2
            assert result["accepted_per_position"] == [18, 18]
            assert result["ratio_to_off"] > 1.5
    assert [(cost["concurrency"], cost["mode"]) for cost in measured["rounds"]] == [r for r in results if r[1] != "off"]
    for cost in measured["rounds"]:
        assert (cost["draft_ms"], cost["transfer_ms"], cost["verify_ms"], cost["host_ms"]) == (4.0, 1.0, 12.0, 1.0)
        assert cost["round_in_plain_steps"] == pytest.approx(1.8)
    assert {"machine", "versions", "config", "model", "plan"} <= measured.keys()


def test_every_mode_gets_the_same_prompts_seeds_and_natural_ends(gateway: FakeGateway, tmp_path: Path) -> None:
    bench(gateway, tmp_path / "bench.json", "--concurrency", "1", "--runs", "1", "--temperature", "0.5")
    sent: dict[int, list[object]] = {}
    for request in gateway.requests:
        assert request.sampling.temperature == 0.5
        assert not request.stopping.ignore_eos
        key = (request.stopping.max_tokens, request.sampling.seed, str(request.messages))
        sent.setdefault(request.speculation_mode, []).append(key)
    assert len(sent) == 4
    assert all(requests == sent[pb.SPECULATION_MODE_OFF] for requests in sent.values())
    assert len(set(sent[pb.SPECULATION_MODE_OFF])) == 3  # warm-up and measured pass alike, at 10 tokens both


def test_outputs_that_differ_between_modes_are_told(gateway: FakeGateway, tmp_path: Path) -> None:
    def drift(request: Any, reply: Any) -> None:
        if request.speculation_mode == pb.SPECULATION_MODE_BLOCK and request.sampling.seed == 1:
            reply.token_ids[0] += 1

    gateway.before_reply = drift
    options = ("--concurrency", "1", "--runs", "1", "--modes", "off,block")
    measured = bench(gateway, tmp_path / "bench.json", *options)
    assert [r["differing_requests"] for r in measured["results"]] == [0, 1]


def fail_some(request: Any) -> None:
    """Every second request of the modes that draft fails."""
    if request.speculation_mode != pb.SPECULATION_MODE_OFF and request.sampling.seed % 2:
        request.messages[-1].content = "overloaded"


def test_a_failed_request_is_told_and_the_bench_goes_on(gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.before_generate = fail_some
    options = ["--prompts", "4", "--concurrency", "2", "--runs", "1", "--modes", "off,tree"]
    path = tmp_path / "bench.json"
    result = CliRunner().invoke(app, ["bench", "--address", gateway.address, *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "tree, 2 clients: 2 of 4 requests failed: RESOURCE_EXHAUSTED" in result.stdout
    off, tree = json.loads(path.read_text())["results"]
    assert (off["failed_requests"], off["requests"]) == (0, 4)
    assert (tree["failed_requests"], tree["requests"], tree["compared_requests"]) == (2, 2, 2)
    assert tree["ratio_to_off"] > 0


def test_kinds_and_the_node_limit_reach_the_requests(gateway: FakeGateway, tmp_path: Path) -> None:
    """Mode off verifies no draft: it gets no limit."""
    options = ("--modes", "off,auto", "--kinds", "maths", "--max-draft-nodes", "5", "--concurrency", "1", "--runs", "1")
    measured = bench(gateway, tmp_path / "bench.json", *options)
    maths = {prompt.messages[-1].content for prompt in load_prompts() if prompt.kind == "maths"}
    for request in gateway.requests:
        assert request.messages[-1].content in maths
        limit = request.max_draft_nodes if request.HasField("max_draft_nodes") else None
        assert limit == (None if request.speculation_mode == pb.SPECULATION_MODE_OFF else 5)
    assert measured["plan"]["max_draft_nodes"] == 5


def test_an_interrupted_bench_goes_on_where_it_stopped(gateway: FakeGateway, tmp_path: Path) -> None:
    """Complete runs are kept; what is left of an interrupted one, a cut line included, is measured again."""
    path = tmp_path / "passes"
    options = ("--modes", "off,auto", "--concurrency", "1", "--runs", "2", "--resume", str(path))
    whole = bench(gateway, tmp_path / "bench.json", *options)
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 2 * 2
    path.write_text("\n".join(lines[:4]) + "\n" + lines[4][:50])
    gateway.requests.clear()
    resumed = bench(gateway, tmp_path / "bench.json", *options)
    assert len(gateway.requests) == 2 * 3 + 2 * 3, "the warm-up and the second run"
    assert len(path.read_text().splitlines()) == 1 + 2 * 2
    for a, b in zip(whole["results"], resumed["results"], strict=True):
        assert a["tokens_per_second_of_runs"][0] == b["tokens_per_second_of_runs"][0]
        assert a["requests"] == b["requests"]
    gateway.requests.clear()
    bench(gateway, tmp_path / "bench.json", *options)
    assert gateway.requests == []


def test_passes_of_another_measurement_are_not_mixed_in(gateway: FakeGateway, tmp_path: Path) -> None:
    path = tmp_path / "passes"
    options = ("--modes", "off,auto", "--concurrency", "1", "--runs", "1", "--resume", str(path))
    bench(gateway, tmp_path / "bench.json", *options)
    result = CliRunner().invoke(app, ["bench", "--address", gateway.address, *options])
    assert result.exit_code == 2
    assert f"--resume {path}: holds another measurement" in " ".join(result.stderr.split())


def test_a_pass_without_a_single_answer_ends_the_bench_with_the_reason(gateway: FakeGateway) -> None:
    def refuse(request: Any) -> None:
        request.messages[-1].content = "overloaded"

    gateway.before_generate = refuse
    result = CliRunner().invoke(app, ["bench", "--address", gateway.address, "--concurrency", "4"])
    assert result.exit_code == 1
    assert "RESOURCE_EXHAUSTED" in result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--modes", "off,forest"], "--modes: 'forest'"),
        (["--kinds", "chat,poems"], "--kinds: 'poems'"),
        (["--concurrency", "1,zero"], "--concurrency: 'zero'"),
        (["--concurrency", "0"], "--concurrency: '0'"),
        (["--json", "/nowhere/bench.json"], "--json /nowhere/bench.json"),
        (["--address", "a:1", "--config", "b.yaml"], "exclude each other"),
        (["--config", "no-such.yaml"], "config no-such.yaml: No such file"),
        (["--profile"], "--profile needs --config"),
        (["--profile", "--config", "no-such.yaml"], "config no-such.yaml: No such file"),
        (["--against", "llama.cpp"], "--against needs --config"),
        (["--against", "vllm", "--config", "no-such.yaml"], "--against: 'vllm' is none of"),
        (["--against", "dflash", "--config", "no-such.yaml"], "config no-such.yaml: No such file"),
        (["--against", "dflash", "--config", "b.yaml", "--concurrency", "4"], "one request at a time"),
        (["--against", "dflash", "--config", "b.yaml", "--temperature", "1"], "measured greedily"),
        (["--against", "dflash", "--config", "b.yaml", "--profile"], "exclude each other"),
    ],
)
def test_wrong_options_are_named_before_anything_runs(options: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_mode_that_the_stack_does_not_serve_is_named() -> None:
    with FakeGateway(modes=("off",)) as gateway:
        result = CliRunner().invoke(app, ["bench", "--address", gateway.address, "--modes", "off,block"])
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
    assert "auto" in result.stdout
    assert "block" not in result.stdout


def test_demo_names_the_key_whose_port_is_taken(config: Path) -> None:
    port = int(config.read_text().split("127.0.0.1:")[1].split("'")[0])
    with FakeGateway(port):
        result = CliRunner().invoke(app, ["demo", "--config", str(config)])
    assert result.exit_code == 2
    assert f"gateway.listen: cannot listen on 127.0.0.1:{port}" in result.stderr


def test_bench_starts_and_stops_the_stack_of_a_config_and_records_it(config: Path, tmp_path: Path) -> None:
    options = ["--config", str(config), "--concurrency", "2", "--prompts", "2", "--runs", "1"]
    result = CliRunner().invoke(app, ["bench", *options, "--json", str(tmp_path / "bench.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "bench.json").read_text())["config"]["target"] == "target"


def test_ctrl_c_during_a_bench_exits_130(gateway: FakeGateway) -> None:
    command = [sys.executable, "-m", "tandem.cli.main", "bench", "--address", gateway.address, "--runs", "10000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not gateway.requests:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in stderr
