"""TLS on real sockets: who is let in, and certificates that are replaced under running services."""

import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.app import Gateway
from tandem.cli.parts import parts_of
from tandem.cli.stack import Stack
from tandem.client import AsyncClient, GenerationError
from tandem.config import StackConfig, load_config
from tandem.errors import StartupError
from tandem.rpc import check_health
from tandem.tls import ClientFiles
from tests.fakes import tokenizers
from tests.fakes.certificates import Authority, of_client, of_server
from tests.fakes.fake_verifier import FakeVerifier
from tests.fakes.gateway_stack import eventually
from tests.fakes.ports import free_port, free_ports
from tests.fakes.tiny_models import random_target

READINESS = "tandem.v1.GenerationService"


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def secrets(tmp_path: Path, authority: Authority) -> Path:
    """Folders `gateway`, `verifier` and `client`, each with a certificate of one authority."""
    for name in ("gateway", "verifier", "client"):
        authority.issue(tmp_path / name, name)
    return tmp_path


@contextlib.asynccontextmanager
async def secure_stack(secrets: Path, **gateway: Any) -> AsyncIterator[tuple[Gateway, FakeVerifier, str]]:
    """A gateway, its verifier, and where health is served in plain text. Both demand certificates."""
    tokenizers.write_target(secrets)
    health, port = f"127.0.0.1:{free_port()}", free_port()
    section = {
        "listen": "127.0.0.1:0",
        "health_listen": health,
        "verifier": f"127.0.0.1:{port}",
        "tls": {"certificate": "gateway/tls.crt", "key": "gateway/tls.key", "client_ca": "gateway/ca.crt"},
        "verifier_tls": {"ca": "gateway/ca.crt", "certificate": "gateway/tls.crt", "key": "gateway/tls.key"},
        **gateway,
    }
    config = StackConfig.model_validate({"target": ".", "gateway": section}, context={"base": secrets})
    served = Gateway(config, poll_seconds=0.05)
    verifier = FakeVerifier(port=port, tls=of_server(secrets / "verifier"))
    await verifier.start()
    await served.start()
    try:
        yield served, verifier, health
    finally:
        await served.stop()
        await verifier.stop()


async def ready(health: str) -> None:
    async with asyncio.timeout(5):
        while await check_health(health, READINESS) != "SERVING":
            await asyncio.sleep(0.02)


async def answer(gateway: Gateway, tls: ClientFiles | None) -> int:
    """Tokens of an answer; GenerationError if the gateway does not let the client in."""
    async with AsyncClient(f"127.0.0.1:{gateway.port}", tls) as client:
        return (await client.generate("hello", max_tokens=5, seed=1).result()).completion_tokens


def shown_certificate(port: int) -> str:
    """What a server shows to whoever comes, in PEM."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=5)


async def test_all_hops_are_mutual_and_probes_need_no_certificate(secrets: Path) -> None:
    async with secure_stack(secrets) as (gateway, _, health):
        await ready(health)
        assert await answer(gateway, of_client(secrets / "client")) == 5


async def test_who_has_no_certificate_or_anothers_is_refused(secrets: Path) -> None:
    """By the gateway and, of the gateway, by the verifier; plain text is refused too."""
    Authority("other").issue(secrets / "stranger", "client")
    stranger = ClientFiles(secrets / "client/ca.crt", secrets / "stranger/tls.crt", secrets / "stranger/tls.key")
    async with secure_stack(secrets) as (gateway, verifier, health):
        await ready(health)
        for tls in (None, of_client(secrets / "client", known=False), stranger):
            with pytest.raises(GenerationError) as refused:
                await answer(gateway, tls)
            assert refused.value.code == "UNAVAILABLE"
    anonymous = {"ca": "gateway/ca.crt"}
    for tls_section in (None, anonymous, {**anonymous, "certificate": "stranger/tls.crt", "key": "stranger/tls.key"}):
        async with secure_stack(secrets, verifier_tls=tls_section) as (gateway, verifier, health):
            await asyncio.sleep(0.3)
            assert await check_health(health, READINESS) == "NOT_SERVING"
            assert not verifier.peer_certificates


async def test_server_of_another_authority_is_not_trusted(secrets: Path) -> None:
    """Neither by clients nor by the gateway: what stands at an address may not be who it should be."""
    Authority("other").issue(secrets / "stranger", "gateway")
    trusting_another = ClientFiles(secrets / "stranger/ca.crt", secrets / "client/tls.crt", secrets / "client/tls.key")
    async with secure_stack(secrets) as (gateway, _, health):
        await ready(health)
        with pytest.raises(GenerationError):
            await answer(gateway, trusting_another)
    wrong = {"ca": "stranger/ca.crt", "certificate": "gateway/tls.crt", "key": "gateway/tls.key"}
    async with secure_stack(secrets, verifier_tls=wrong) as (_, verifier, health):
        await asyncio.sleep(0.3)
        assert await check_health(health, READINESS) == "NOT_SERVING"
        assert not verifier.peer_certificates


async def test_only_health_is_served_in_plain_text(secrets: Path) -> None:
    async with secure_stack(secrets) as (_, _, health):
        await ready(health)
        async with AsyncClient(health) as client:
            with pytest.raises(GenerationError) as refused:
                await client.model()
        assert refused.value.code == "UNIMPLEMENTED"


async def test_replaced_certificates_are_taken_up_without_a_break(secrets: Path, authority: Authority) -> None:
    """A server shows the new one to who comes next; the gateway calls with the new one; a stream goes on meanwhile."""
    async with secure_stack(secrets) as (gateway, verifier, health):
        await ready(health)
        verifier.stall_after = 3
        async with AsyncClient(f"127.0.0.1:{gateway.port}", of_client(secrets / "client")) as client:
            stream = client.generate("hello", max_tokens=10, seed=1)
            while len(stream.token_ids) < 3:
                await anext(stream)
            authority.issue(secrets / "gateway", "gateway of tomorrow")
            renewed = (secrets / "gateway/tls.crt").read_text()
            await eventually(lambda: renewed.encode() in verifier.peer_certificates)
            assert await asyncio.to_thread(shown_certificate, gateway.port) == renewed
            verifier.stall_after = None
            verifier.resume.set()
            assert (await stream.result()).completion_tokens == 10
        assert await answer(gateway, of_client(secrets / "client")) == 5


async def test_files_that_cannot_be_used_leave_the_last_ones_in_use(secrets: Path) -> None:
    async with secure_stack(secrets) as (gateway, _, health):
        await ready(health)
        (secrets / "gateway/tls.crt").unlink()
        (secrets / "gateway/tls.crt").write_text("half a certif")
        await asyncio.sleep(0.2)
        assert await answer(gateway, of_client(secrets / "client")) == 5
        assert await check_health(health, READINESS) == "SERVING"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tls.crt", None, "gateway.tls.certificate: "),
        ("tls.key", "x", "gateway.tls.certificate: "),
        ("ca.crt", "x", "gateway.tls.client_ca: "),
    ],
)
async def test_wrong_file_is_a_start_up_error_with_its_key(
    secrets: Path, file: str, content: str | None, says: str
) -> None:
    (secrets / "gateway" / file).unlink()
    if content:
        (secrets / "gateway" / file).write_text(content)
    with pytest.raises(StartupError, match=says):
        async with secure_stack(secrets, verifier_tls=None):
            pass


async def test_key_of_another_certificate_is_a_start_up_error(secrets: Path) -> None:
    key = secrets / "gateway/tls.key"
    key.unlink()
    key.write_bytes((secrets / "client/tls.key").read_bytes())
    with pytest.raises(StartupError, match=r"gateway\.verifier_tls\.certificate: .*KEY_VALUES_MISMATCH"):
        async with secure_stack(secrets):
            pass


async def tandem(*arguments: str) -> tuple[int, str]:
    """The command's exit code and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tandem.cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.mark.slow
async def test_real_services_and_commands_speak_tls(secrets: Path, authority: Authority) -> None:
    """All three as processes, as `tandem up` runs them. A drafter registers; one with another authority's certificate
    does not, until that is replaced by a good one."""
    authority.issue(secrets / "drafter", "drafter")
    Authority("other").issue(secrets / "stranger", "drafter")
    random_target(secrets)
    config_json = (secrets / "config.json").read_text()
    tokenizers.write_target(secrets)
    (secrets / "config.json").write_text(config_json)
    ports = free_ports(5)
    gateway, verifier, drafter, *healths = (f"127.0.0.1:{port}" for port in ports)

    def server(name: str) -> dict[str, str]:
        return {"certificate": f"{name}/tls.crt", "key": f"{name}/tls.key", "client_ca": f"{name}/ca.crt"}

    def client(name: str) -> dict[str, str]:
        return {"certificate": f"{name}/tls.crt", "key": f"{name}/tls.key", "ca": "client/ca.crt"}

    config = {
        "target": ".",
        "gateway": {
            **{"listen": gateway, "health_listen": healths[0], "verifier": verifier},
            **{"tls": server("gateway"), "verifier_tls": client("gateway")},
        },
        "verifier": {
            **{"listen": verifier, "health_listen": healths[1], "tls": server("verifier")},
            **{"dtype": "float32", "threads": 1, "warm_up_seconds": 0.1},
        },
        "drafter": {
            **{"listen": drafter, "verifier": verifier, "verifier_tls": client("drafter")},
            **{"draft_source": "ngram", "reconnect_max_seconds": 0.2},
        },
    }
    path = secrets / "stack.yaml"
    path.write_text(yaml.safe_dump(config))
    lines: list[str] = []
    parts = parts_of(load_config(path), path)
    async with Stack(parts, lambda part, line: lines.append(f"{part} | {line}"), ready_timeout_seconds=120):
        code, output = await tandem("status", "--config", str(path))
        assert code == 0, output
        assert "drafters" in output
        files = [f"--tls-{key}={secrets}/client/{file}" for key, file in (("cert", "tls.crt"), ("key", "tls.key"))]
        trust = f"--tls-ca={secrets}/client/ca.crt"
        ask = ("generate", "hello", f"--address={gateway}", "--max-tokens=5", "--ignore-eos", "--stats")
        code, output = await tandem(*ask, trust, *files)
        assert code == 0, output
        assert "5 tokens" in output
        code, output = await tandem(*ask, trust)
        assert (code, "UNAVAILABLE" in output) == (1, True), output
    assert not [line for line in lines if "Traceback" in line]

    config["drafter"] |= {"verifier_tls": client("stranger")}
    path.write_text(yaml.safe_dump(config))
    verifier_part, drafter_part, _ = parts_of(load_config(path), path)
    async with Stack([verifier_part], lambda *_: None, ready_timeout_seconds=120):
        registering = asyncio.create_task(_until_registered(drafter_part.command, lines))
        await eventually(lambda: any("UNAVAILABLE" in line for line in lines), 30)
        assert not registering.done()
        authority.issue(secrets / "stranger", "drafter")
        await asyncio.wait_for(registering, 20)


async def _until_registered(command: tuple[str, ...], lines: list[str]) -> None:
    """Run a drafter until it says that it has registered; what it says is added to `lines`."""
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr
        async for line in process.stderr:
            lines.append(line.decode())
            if "registered with" in lines[-1]:
                return
    finally:
        process.kill()
        await process.wait()
