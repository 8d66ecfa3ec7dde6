"""`python -m gateway` as operators run it: start-up errors, metrics, signals, and a verifier process that is killed."""

import asyncio
import contextlib
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tandem.client import AsyncClient, GenerationError
from tandem.rpc import check_health
from tests.fakes import tokenizers
from tests.fakes.fake_verifier import FakeVerifier
from tests.fakes.ports import free_ports

SERVICE = "tandem.v1.GenerationService"


def write_config(folder: Path, **section: object) -> Path:
    tokenizers.write_target(folder)
    path = folder / "stack.yaml"
    path.write_text(yaml.safe_dump({"target": ".", "gateway": section}))
    return path


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process that does not outlive the test."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()


@contextlib.asynccontextmanager
async def fake_verifier() -> AsyncIterator[FakeVerifier]:
    verifier = FakeVerifier()
    await verifier.start()
    try:
        yield verifier
    finally:
        await verifier.stop()


async def until(address: str, service: str, status: str) -> None:
    while await check_health(address, service, timeout=0.5) != status:
        await asyncio.sleep(0.05)


async def test_it_serves_measures_and_ends_at_sigterm(tmp_path: Path) -> None:
    """A generation in flight gets its grace, the process exits 0, and its metrics count what it did."""
    port, metrics_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    async with fake_verifier() as verifier:
        config = write_config(
            tmp_path,
            listen=address,
            metrics_listen=f"127.0.0.1:{metrics_port}",
            verifier=f"127.0.0.1:{verifier.port}",
        )
        async with process("-m", "gateway", "--config", str(config)) as gateway, AsyncClient(address) as client:
            await asyncio.wait_for(until(address, SERVICE, "SERVING"), 20)
            final = await client.generate("hello", max_tokens=20, seed=1).result()
            with pytest.raises(GenerationError):
                await client.generate("", max_tokens=1).result()
            await client.open_session()

            def scrape() -> dict[str, float]:
                with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as reply:
                    lines = reply.read().decode().splitlines()
                return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

            metrics = await asyncio.to_thread(scrape)
            assert metrics['tandem_gateway_requests_total{code="OK",method="Generate"}'] == 1
            assert metrics['tandem_gateway_requests_total{code="INVALID_ARGUMENT",method="Generate"}'] == 1
            assert metrics["tandem_gateway_prompt_tokens_total"] == final.prompt_tokens
            assert metrics["tandem_gateway_generation_tokens_total"] == 20
            assert metrics["tandem_time_to_first_token_seconds_count"] == 1
            assert metrics["tandem_inter_token_latency_seconds_count"] == 19
            assert metrics["tandem_e2e_request_latency_seconds_count"] == 1
            assert metrics["tandem_gateway_requests_in_flight"] == 0
            assert metrics["tandem_gateway_sessions"] == 1
            assert metrics["tandem_gateway_verifier_ready"] == 1
            assert metrics["tandem_gateway_resubmissions_total"] == 0

            verifier.stall_after = 5
            generation = client.generate("hello", max_tokens=10, seed=1)
            while len(generation.token_ids) < 5:
                await anext(generation)
            gateway.send_signal(signal.SIGTERM)
            await asyncio.wait_for(until(address, SERVICE, "UNAVAILABLE"), 5)
            assert gateway.returncode is None
            generation.cancel()
            _, stderr = await asyncio.wait_for(gateway.communicate(), 5)
            assert gateway.returncode == 0
            assert b"Traceback" not in stderr, stderr.decode()


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"listen": "127.0.0.1"}, "gateway.listen: "),
        ({"listne": "127.0.0.1:0"}, "gateway.listne: unknown key"),
        ({"listen": "203.0.113.1:1"}, "gateway.listen: cannot listen on 203.0.113.1:1"),
    ],
)
async def test_a_wrong_config_ends_in_one_line(tmp_path: Path, section: dict[str, object], says: str) -> None:
    config = write_config(tmp_path, **section)
    async with process("-m", "gateway", "--config", str(config)) as gateway:
        _, stderr = await asyncio.wait_for(gateway.communicate(), 20)
    assert gateway.returncode == 2
    lines = [line for line in stderr.decode().splitlines() if says in line]
    assert len(lines) == 1
    assert b"Traceback" not in stderr


async def test_it_imports_no_torch() -> None:
    code = "import gateway.app, gateway.__main__, tandem.client, sys; sys.exit('torch' in sys.modules)"
    async with process("-c", code) as python:
        assert await asyncio.wait_for(python.wait(), 20) == 0


async def test_importing_tandem_loads_no_grpc() -> None:
    code = "import tandem, sys; assert 'grpc' not in sys.modules; tandem.Client; assert 'grpc' in sys.modules"
    async with process("-c", code) as python:
        assert await asyncio.wait_for(python.wait(), 20) == 0


FAKE_PROCESS = """
import asyncio, sys
from tests.fakes.fake_verifier import FakeVerifier
async def main():
    await FakeVerifier(port=int(sys.argv[1]), stall_after=int(sys.argv[2]) or None).start()
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_stream_survives_sigkill_of_the_verifiers_process(tmp_path: Path) -> None:
    """The kernel resets the connection; the generation goes on at the next process, with the same ids."""
    port, verifier_port = free_ports(2)
    address, verifier_address = f"127.0.0.1:{port}", f"127.0.0.1:{verifier_port}"
    config = write_config(tmp_path, listen=address, verifier=verifier_address)
    fake = ("-c", FAKE_PROCESS, str(verifier_port))
    async with process("-m", "gateway", "--config", str(config)), AsyncClient(address) as client:
        async with process(*fake, "9") as verifier:
            await asyncio.wait_for(until(address, SERVICE, "SERVING"), 20)
            generation = client.generate("hello", max_tokens=30, seed=4)
            while len(generation.token_ids) < 9:
                await anext(generation)
            verifier.send_signal(signal.SIGKILL)
            await verifier.wait()
        async with process(*fake, "0"):
            await asyncio.wait_for(generation.result(), 20)
            await asyncio.wait_for(until(address, SERVICE, "SERVING"), 5)
            again = client.generate("hello", max_tokens=30, seed=4)
            await again.result()
            assert generation.token_ids == again.token_ids
            assert len(generation.token_ids) == 30
