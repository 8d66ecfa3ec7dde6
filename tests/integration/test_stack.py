"""Three real processes on the real demo models in fp32: lossless, and whole whatever happens to the drafter."""

import asyncio
import os
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import yaml

from tandem.cli.parts import parts_of
from tandem.cli.stack import Stack
from tandem.client import AsyncClient, Final, Message
from tandem.config import load_config
from tandem.prompts import Prompt, mixed_prompts
from tandem.v1 import verification_pb2, verification_pb2_grpc
from tests.fakes.ports import free_ports

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]


@dataclass
class Running:
    """A stack and a client of it."""

    client: AsyncClient
    stack: Stack
    verifier: str
    metrics: int
    lines: list[str]

    def pid(self, part: str) -> int:
        return self.stack._children[part].pid

    async def load(self) -> verification_pb2.GetLoadResponse:
        async with grpc.aio.insecure_channel(self.verifier) as channel:
            stub = verification_pb2_grpc.VerifierServiceStub(channel)
            return await stub.GetLoad(verification_pb2.GetLoadRequest())  # type: ignore[misc]

    async def tokens(self, prompt: Prompt, speculation: str, **options: object) -> tuple[list[int], Final]:
        messages = [Message(t.role, t.content) for t in prompt.messages]
        values: dict[str, object] = {"ignore_eos": True, **options}
        generation = self.client.generate(messages, speculation_mode=speculation, **values)  # type: ignore[arg-type]
        async for _ in generation:
            pass
        return generation.token_ids, generation.final

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@asynccontextmanager
async def running_stack(folder: Path, **verifier: object) -> AsyncIterator[Running]:
    ports = free_ports(4)
    gateway, verify, draft = (f"127.0.0.1:{p}" for p in ports[:3])
    config = {
        "target": str(ROOT / "models/smollm2-135m-instruct"),
        "draft_model": str(ROOT / "models/smollm2-135m-dflash"),
        "gateway": {"listen": gateway, "verifier": verify},
        "verifier": {
            "listen": verify,
            "metrics_listen": f"127.0.0.1:{ports[3]}",
            "dtype": "float32",
            "draft_timeout_ms": 5000,
            **verifier,
        },
        "drafter": {"listen": draft, "verifier": verify, "dtype": "float32"},
    }
    path = folder / "stack.yaml"
    path.write_text(yaml.safe_dump(config))
    lines: list[str] = []
    stack = Stack(parts_of(load_config(path), path), lambda part, line: lines.append(f"{part} | {line}"))
    try:
        async with stack, AsyncClient(gateway) as client:
            yield Running(client, stack, verify, ports[3], lines)
    except BaseException:
        print("\n".join(lines[-60:]))
        raise


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.mark.parametrize("batch", [1, 8])
async def test_drafted_ids_equal_plain_ids(running: Running, batch: int) -> None:
    """Part of benchmarks/lossless.py's matrix: prompts of each kind, temperature 0 and 0.8 with three seeds, fp32."""
    prompts = mixed_prompts(6)
    cases = [(p, {"temperature": t, "seed": s}) for p in prompts for t, s in ((0.0, 1), (0.8, 1), (0.8, 2), (0.8, 3))]
    gate = asyncio.Semaphore(batch)

    async def one(prompt: Prompt, options: dict[str, float], mode: str) -> list[int]:
        async with gate:
            ids, final = await running.tokens(prompt, mode, max_tokens=20, **options)
            assert (final.drafts > 0) == (mode == "block")
            return ids

    plain = await asyncio.gather(*(one(p, o, "off") for p, o in cases))
    drafted = await asyncio.gather(*(one(p, o, "block") for p, o in cases))
    assert drafted == plain
    assert len(set(map(tuple, plain))) > len(cases) / 2


async def test_figures_of_a_request_agree_with_the_counters(running: Running) -> None:
    names = {
        "tandem_generation_tokens_total": "emitted",
        "tandem_spec_decode_num_drafts_total": "drafts",
        "tandem_spec_decode_num_draft_tokens_total": "drafted_tokens",
        "tandem_spec_decode_num_accepted_tokens_total": "accepted_tokens",
        "tandem_spec_decode_num_accepted_tokens_per_pos_total": "accepted_tokens",
    }
    before = {name: running.metric(name) for name in names}
    ids, final = await running.tokens(mixed_prompts(1)[0], "block", max_tokens=40, temperature=0.0)
    grown = {name: running.metric(name) - before[name] for name in names}
    figures = {"emitted": len(ids), **vars(final)}
    assert grown == {name: figures[figure] for name, figure in names.items()}
    assert final.completion_tokens == len(ids) == 40
    assert final.accepted_tokens == sum(final.accepted_per_position)
    assert final.accepted_tokens > 0


async def test_a_killed_drafter_costs_speed_only_and_comes_back(running: Running) -> None:
    """SIGKILL under running streams: same text; started again, speculation resumes on the same streams."""
    prompts = mixed_prompts(4)
    options: dict[str, object] = {"max_tokens": 250, "temperature": 0.8, "seed": 5}
    plain = [(await running.tokens(p, "off", **options))[0] for p in prompts[:2]]
    streams = [asyncio.create_task(running.tokens(p, "block", **options)) for p in prompts]

    async def drafted_tokens(above: int) -> int:
        while (count := (await running.load()).drafted_tokens) <= above:
            assert not all(s.done() for s in streams), "the streams ended first"
            await asyncio.sleep(0.05)
        return count

    await drafted_tokens((await running.load()).drafted_tokens + 100)
    victim = running.pid("drafter")
    os.kill(victim, signal.SIGKILL)
    while (await running.load()).drafters:
        await asyncio.sleep(0.02)
    undrafted = (await running.load()).drafted_tokens
    await drafted_tokens(undrafted + 50)
    assert running.pid("drafter") != victim
    results = await asyncio.gather(*streams)
    assert [ids for ids, _ in results[:2]] == plain
    assert all(len(ids) == 250 for ids, _ in results)
    load = await running.load()
    assert (load.running_sequences, load.waiting_sequences, load.kv_blocks_used) == (0, 0, 0)


async def test_a_client_that_leaves_frees_the_blocks(running: Running) -> None:
    generation = running.client.generate([Message("user", "Count to a thousand.")], max_tokens=1000, ignore_eos=True)
    async for _ in generation:
        break
    assert (await running.load()).kv_blocks_used > 0
    generation.cancel()
    async with asyncio.timeout(10):
        while (await running.load()).kv_blocks_used:
            await asyncio.sleep(0.05)
