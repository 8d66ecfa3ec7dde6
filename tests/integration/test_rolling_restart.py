"""Each service is replaced under 16 streams as the manifests have it done: no stream fails, none says another word."""

import asyncio
import contextlib
import itertools
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from tandem.client import AsyncClient, GenerationError
from tandem.rpc import check_health
from tandem.v1 import verification_pb2, verification_pb2_grpc
from tests.fakes import tokenizers
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import random_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STREAMS, TOKENS = 16, 400
PRE_STOP_SECONDS = 1.0
"""15 in the manifests, for endpoints of a whole cluster to forget a pod."""
READINESS = {
    "gateway": "tandem.v1.GenerationService",
    "verifier_service": "tandem.v1.VerifierService",
    "drafter_service": "tandem.Drafter",
}


class Service:
    """Before the gateways, as kube-proxy: a new connection goes to a ready one, and stays with it.

    Each client has an address of its own: within a process gRPC shares the connections to one address."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        """Ports."""
        self.connections: Counter[int] = Counter()
        self._turn = itertools.count()
        self._forwarding: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Service":
        self._servers = [await asyncio.start_server(self._accept, "127.0.0.1", 0) for _ in range(STREAMS)]
        self.addresses = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in self._servers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in self._forwarding:
            task.cancel()
        await asyncio.gather(*self._forwarding, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = self.ready[next(self._turn) % len(self.ready)]
        with contextlib.closing(writer):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            self.connections[port] += 1
            with contextlib.closing(far_writer):
                ways = {asyncio.create_task(_copy(reader, far_writer)), asyncio.create_task(_copy(far_reader, writer))}
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self.connections[port] -= 1
                    for way in ways:
                        way.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()


@dataclass
class Pod:
    """A process of a service."""

    module: str
    port: int
    process: asyncio.subprocess.Process
    log: Path

    async def ready(self) -> None:
        async with asyncio.timeout(90):
            while await check_health(f"127.0.0.1:{self.port}", READINESS[self.module]) != "SERVING":
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.1)

    async def ends(self, seconds: float) -> None:
        """By SIGTERM, within its grace, in order."""
        self.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(self.process.wait(), seconds) == 0, self.log.read_text()
        assert "Traceback" not in self.log.read_text()


class Cluster:
    """The pods of a tiny target with n-gram drafts."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._number = itertools.count()
        self._pods: list[Pod] = []
        self.verifier_port = free_port()
        random_target(folder / "target")
        config = (folder / "target/config.json").read_text()
        tokenizers.write_target(folder / "target")
        (folder / "target/config.json").write_text(config)

    async def pod(self, module: str) -> Pod:
        """A new one. As behind a headless Service, the verifier is always found at the same address."""
        port = self.verifier_port if module == "verifier_service" else free_port()
        name, verifier = f"{module}-{next(self._number)}", f"127.0.0.1:{self.verifier_port}"
        address = {"listen": f"127.0.0.1:{port}"}
        config = {
            "target": "target",
            "gateway": {"verifier": verifier, "shutdown_grace_seconds": 30},
            "verifier": {
                "dtype": "float32",
                "threads": 1,
                "kv_blocks": 1024,
                "warm_up_seconds": 0.2,
                # So short that no stream ends by itself: all must be taken up by the next one.
                "shutdown_grace_seconds": 0.2,
            },
            "drafter": {"verifier": verifier, "draft_source": "ngram"},
        }
        config[module.removesuffix("_service")] |= address  # type: ignore[operator]
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        log = self._folder / f"{name}.log"
        with log.open("w") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, "--config", str(path), stdout=output, stderr=output
            )
        pod = Pod(module, port, process, log)
        self._pods.append(pod)
        return pod

    async def load(self) -> Any:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.verifier_port}") as channel:
            stub: Any = verification_pb2_grpc.VerifierServiceStub(channel)
            return await stub.GetLoad(verification_pb2.GetLoadRequest())

    async def kill(self) -> None:
        for pod in self._pods:
            with contextlib.suppress(ProcessLookupError):
                pod.process.kill()
            await pod.process.wait()


@contextlib.asynccontextmanager
async def cluster_in(folder: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        await cluster.kill()


async def answer(client: AsyncClient, number: int) -> list[int]:
    """Of stream `number`: what it says depends on nothing but that."""
    generation = client.generate(
        [5 + number, 6, 7],
        max_tokens=TOKENS,
        temperature=0.8,
        seed=number,
        ignore_eos=True,
        speculation_mode="tree",
    )
    await generation.result()
    return generation.token_ids


@contextlib.asynccontextmanager
async def streams(addresses: list[str], expected: list[list[int]]) -> AsyncIterator[Callable[[], int]]:
    """16 clients ask again and again while the block runs; gives how many answers came. Every other client keeps its
    connection, the others connect anew for each answer. What fails, or says something else, fails the block."""
    over, answers = asyncio.Event(), 0

    async def one(number: int) -> None:
        nonlocal answers
        async with contextlib.AsyncExitStack() as kept:
            client = await kept.enter_async_context(AsyncClient(addresses[number])) if number % 2 else None
            while not over.is_set():
                if client:
                    said = await answer(client, number)
                else:
                    async with AsyncClient(addresses[number]) as new:
                        said = await answer(new, number)
                assert said == expected[number]
                answers += 1

    async with asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(one(number))
        yield lambda: answers
        over.set()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_no_stream_fails_while_services_are_replaced(tmp_path: Path) -> None:
    async with cluster_in(tmp_path) as cluster, Service() as service:
        verifier = await cluster.pod("verifier_service")
        drafter, *gateways = [await cluster.pod(module) for module in ("drafter_service", "gateway", "gateway")]
        for pod in (verifier, drafter, *gateways):
            await pod.ready()
        service.ready = [gateway.port for gateway in gateways]
        async with AsyncClient(service.addresses[0]) as client:
            expected = await asyncio.gather(*(answer(client, number) for number in range(STREAMS)))
        assert len({tuple(said) for said in expected}) == STREAMS

        async with streams(service.addresses, expected) as answers:
            # Gateways, one after another: maxSurge 1, maxUnavailable 0.
            for old in gateways:
                new = await cluster.pod("gateway")
                await new.ready()
                service.ready = [new.port, *(port for port in service.ready if port != old.port)]
                await asyncio.sleep(PRE_STOP_SECONDS)
                assert service.connections[old.port]
                await old.ends(seconds=40)
                assert not service.connections[old.port]
                gateways = [new, *(gateway for gateway in gateways if gateway is not old)]

            # The drafter: the next one has registered before it leaves, which it does at once.
            successor = await cluster.pod("drafter_service")
            await successor.ready()
            await drafter.ends(seconds=10)
            drafted, answered = (await cluster.load()).drafted_tokens, answers()

            async def drafts_go_on() -> bool:
                load = await cluster.load()
                return load.drafters == 1 and load.drafted_tokens > drafted and answers() > answered

            await until(drafts_go_on)

        await _replace_the_verifier(cluster, service.addresses[0], verifier, gateways, expected)


async def _replace_the_verifier(
    cluster: Cluster, address: str, old: Pod, gateways: list[Pod], expected: list[list[int]]
) -> None:
    """Recreate: one goes before the next comes, and its streams wait for it. A new call is told when to try again."""
    async with AsyncClient(address) as client:
        running = [asyncio.create_task(answer(client, number)) for number in range(STREAMS)]

        async def all_run() -> bool:
            return (await cluster.load()).running_sequences == STREAMS

        await until(all_run)
        await old.ends(seconds=30)
        assert not any(stream.done() for stream in running)

        async def gateways_know() -> bool:
            asked = [check_health(f"127.0.0.1:{gateway.port}", READINESS["gateway"]) for gateway in gateways]
            return set(await asyncio.gather(*asked)) == {"NOT_SERVING"}

        await until(gateways_know)
        with pytest.raises(GenerationError) as refused:
            await client.generate([1, 2, 3], max_tokens=1).result()
        assert refused.value.code == "UNAVAILABLE"
        assert refused.value.retry_after_seconds
        await (await cluster.pod("verifier_service")).ready()
        assert await asyncio.gather(*running) == expected
    resubmitted = sum(gateway.log.read_text().count("submitting again") for gateway in gateways)
    assert resubmitted == STREAMS
    load = await cluster.load()
    assert (load.running_sequences, load.waiting_sequences, load.kv_blocks_used) == (0, 0, 0)
