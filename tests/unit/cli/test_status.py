"""`tandem status` and what a config says about the parts of its stack."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.cli.parts import check_ports_free, dialable, parts_of
from tandem.config import StackConfig, load_config
from tandem.errors import StartupError
from tandem.v1 import generation_pb2, verification_pb2, verification_pb2_grpc
from tests.fakes.ports import free_port


class FakeVerifier(verification_pb2_grpc.VerifierServiceServicer):
    def GetInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return verification_pb2.GetInfoResponse(model="smol", dtype="bfloat16")

    def GetLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        step = generation_pb2.StepTiming(draft_us=4000, transfer_us=500, verify_us=18000, host_us=1500, rows=8)
        return verification_pb2.GetLoadResponse(
            running_sequences=3,
            waiting_sequences=2,
            kv_blocks_used=40,
            kv_blocks_cached=60,
            kv_blocks_total=1024,
            drafters=1,
            median_drafted_step=step,
            emitted_tokens=700,
            drafts=200,
            drafted_tokens=1400,
            accepted_tokens=140,
            speculation=verification_pb2.SpeculationState(
                mode=generation_pb2.SPECULATION_MODE_TREE,
                asked_nodes=6,
                reason="pays",
                gain=1.234,
                expected_tokens=1.9,
                draft_us=4200,
                step_us=21000,
                plain_step_us=16400,
            ),
        )


def serve(services: list[str], with_verifier: bool = False) -> tuple[grpc.Server, int]:
    server = grpc.server(ThreadPoolExecutor(4))
    servicer = health.HealthServicer()
    for service in services:
        servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if with_verifier:
        verification_pb2_grpc.add_VerifierServiceServicer_to_server(FakeVerifier(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    """All three parts, serving."""
    servers = {
        "gateway": serve(["tandem.v1.GenerationService"]),
        "verifier": serve(["tandem.v1.VerifierService", "tandem.v1.SpeculationService"], with_verifier=True),
        "drafter": serve(["tandem.Drafter"]),
    }
    yield {name: port for name, (_, port) in servers.items()}
    for server, _ in servers.values():
        server.stop(0)


def write_config(folder: Path, ports: dict[str, int], draft_model: bool = True) -> Path:
    for name in ("target", "draft"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text("{}")
    lines = ["target: target"] + (["draft_model: draft"] if draft_model else [])
    lines += [f"{name}: {{listen: '127.0.0.1:{port}'}}" for name, port in ports.items()]
    (folder / "stack.yaml").write_text("\n".join(lines))
    return folder / "stack.yaml"


def status(config: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["status", "--config", str(config)])
    return result.exit_code, result.stdout


def test_a_serving_stack_is_exit_0_with_live_figures(ports: dict[str, int], tmp_path: Path) -> None:
    code, shown = status(write_config(tmp_path, ports))
    assert code == 0
    assert shown.count("SERVING") == 3
    for figure in (
        "3 running, 2 waiting",
        "40 used, 60 cached, 924 free",
        "1.70 over 200 drafted steps",
        "10.0% (140 of 1400)",
        "24.0 ms = draft 4.0 + transfer 0.5 + verify 18.0 + host 1.5; 8 rows",
        "6 nodes: pays; gain 1.23 (1.90 tokens in 4.2 + 21.0 ms, plain 1 in 16.4 ms)",
    ):
        assert figure in shown


@pytest.mark.parametrize("dead", ["gateway", "verifier", "drafter"])
def test_a_part_that_is_not_serving_is_exit_1(ports: dict[str, int], tmp_path: Path, dead: str) -> None:
    code, shown = status(write_config(tmp_path, ports | {dead: free_port()}))
    assert code == 1
    assert shown.count("SERVING") == 2
    assert "UNAVAILABLE" in shown


def test_without_a_draft_model_no_drafter_is_asked_for(ports: dict[str, int], tmp_path: Path) -> None:
    code, shown = status(write_config(tmp_path, ports | {"drafter": free_port()}, draft_model=False))
    assert code == 0
    assert "127.0.0.1" in shown
    assert shown.count("SERVING") == 2


def test_a_wrong_config_is_exit_2_naming_the_key(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text("target: nowhere\ngateway: {listne: 'a:1'}")
    result = CliRunner().invoke(app, ["status", "--config", str(tmp_path / "stack.yaml")])
    assert result.exit_code == 2
    assert "gateway.listne: unknown key" in result.stderr


def test_parts_run_the_services_of_the_config(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"gateway": 7600, "verifier": 7601, "drafter": 7602})
    verifier, drafter, gateway = parts_of(load_config(path), path)
    assert [part.command[1:] for part in (verifier, drafter, gateway)] == [
        ("-m", module, "--config", str(path)) for module in ("verifier_service", "drafter_service", "gateway")
    ]
    assert (verifier.essential, drafter.essential, gateway.essential) == (True, False, True)
    assert drafter.address == "127.0.0.1:7602"
    path = write_config(tmp_path, {}, draft_model=False)
    parts = parts_of(load_config(path), path)
    assert [part.name for part in parts] == ["verifier", "gateway"]
    assert parts[0].health_services == ("tandem.v1.VerifierService",)


def config_of(folder: Path, text: str) -> StackConfig:
    write_config(folder, {})
    (folder / "stack.yaml").write_text("target: target\ndraft_model: draft\n" + text)
    return load_config(folder / "stack.yaml")


def test_every_key_whose_port_is_taken_is_named_twice_in_one_config_included(tmp_path: Path) -> None:
    free = [free_port() for _ in range(3)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = config_of(
            tmp_path,
            f"gateway: {{listen: '127.0.0.1:{free[0]}', metrics_listen: '127.0.0.1:{port}'}}\n"
            f"verifier: {{listen: '127.0.0.1:{free[1]}', metrics_listen: '127.0.0.1:{free[1]}'}}\n"
            f"drafter: {{listen: '127.0.0.1:{port}'}}\n",
        )
        with pytest.raises(StartupError) as caught:
            check_ports_free(config)
    keys = [line.split(":")[0] for line in str(caught.value).splitlines()]
    assert keys == ["gateway.metrics_listen", "verifier.metrics_listen", "drafter.listen"]


def test_free_ports_pass_and_stay_free(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    sections = [
        f"{name}: {{listen: 'localhost:{port}'}}"
        for name, port in zip(("gateway", "verifier", "drafter"), ports, strict=True)
    ]
    config = config_of(tmp_path, "\n".join(sections))
    check_ports_free(config)
    check_ports_free(config)


def test_a_wildcard_address_is_dialled_on_this_machine() -> None:
    assert dialable("0.0.0.0:7600") == "127.0.0.1:7600"
    assert dialable("[::]:7600") == "[::1]:7600"
    assert dialable("10.1.2.3:7600") == "10.1.2.3:7600"
