"""A verifier as real processes over several ranks, and a drafter that knows the truth."""

import asyncio
import contextlib
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import yaml

from tandem.draft_tree import Draft
from tandem.rpc import check_health
from tandem.v1 import generation_pb2, speculation_pb2, speculation_pb2_grpc, verification_pb2, verification_pb2_grpc
from tests.fakes.ports import free_port
from tests.fakes.trees import tree_around

VOCAB = 512
PROMPT = [(37 * i + 11) % VOCAB for i in range(20)]


GREEDY = generation_pb2.SamplingParams(temperature=0.0)


class Verifier:
    """The running process and calls to it."""

    def __init__(self, process: asyncio.subprocess.Process, channel: grpc.aio.Channel, log: Path):
        self.process = process
        self.generation: Any = verification_pb2_grpc.VerifierServiceStub(channel)
        self.speculation: Any = speculation_pb2_grpc.SpeculationServiceStub(channel)
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def ranks(self) -> dict[int, int]:
        """Process ids of the others, by rank, as rank 0 logs them."""
        (listed,) = re.findall(r"the other ranks' processes: (.*)", self.log)
        return {int(rank): int(pid) for rank, pid in re.findall(r"(\d+): (\d+)", listed)}

    def generate(
        self,
        max_tokens: int = 40,
        mode: int = generation_pb2.SPECULATION_MODE_TREE,
        prompt: Sequence[int] = PROMPT,
        sampling: generation_pb2.SamplingParams = GREEDY,
    ) -> Any:
        return self.generation.Generate(
            verification_pb2.VerifierServiceGenerateRequest(
                request_id=str(random.random()),
                token_ids=prompt,
                prompt_length=len(prompt),
                sampling=sampling,
                max_tokens=max_tokens,
                speculation_mode=mode,
            )
        )

    async def load(self) -> Any:
        return await self.generation.GetLoad(verification_pb2.GetLoadRequest())

    @asynccontextmanager
    async def drafted(self, *truths: Sequence[int]) -> AsyncIterator[None]:
        """With a drafter whose drafts hold the truth among wrong tokens, so that some of each is accepted, apart, and
        moves. truths: whole texts; a sequence's is the one that begins as it does."""
        drafting = asyncio.create_task(self._draft(truths))
        try:
            while not (await self.load()).drafters:
                await asyncio.sleep(0.01)
            yield
        finally:
            drafting.cancel()

    async def _draft(self, truths: Sequence[Sequence[int]]) -> None:
        call = self.speculation.Speculate()
        registration = speculation_pb2.Registration(
            protocol_version=1, vocab_size=VOCAB, draft_source=speculation_pb2.DRAFT_SOURCE_NGRAM, drafter_name="test"
        )
        await call.write(speculation_pb2.DrafterMessage(registration=registration))
        rng = random.Random(0)
        known: dict[int, Sequence[int]] = {}
        while (message := await call.read()) is not grpc.aio.EOF:
            for context in message.round.contexts:
                if context.start_position == 0:
                    seen = list(context.token_ids)
                    known[context.sequence_id] = next(t for t in truths if list(t[: len(seen)]) == seen)
            for asked in message.round.requests:
                ahead = list(known[asked.sequence_id][asked.base_position + 1 :])
                nodes = min(8, asked.max_nodes)
                if asked.shape == speculation_pb2.DRAFT_SHAPE_BLOCK:
                    draft = _block_along(ahead, nodes, rng)
                else:
                    draft = tree_around(ahead, nodes, VOCAB, rng)
                answer = speculation_pb2.Draft(
                    sequence_id=asked.sequence_id,
                    epoch=asked.epoch,
                    base_position=asked.base_position,
                    tokens=draft.tokens,
                    parents=draft.parents,
                    log_probs=draft.log_probs,
                )
                await call.write(speculation_pb2.DrafterMessage(drafts=speculation_pb2.DraftBatch(drafts=[answer])))

    async def ended(self, seconds: float) -> int:
        """The exit code; no rank outlives it."""
        code = await asyncio.wait_for(self.process.wait(), seconds)
        deadline = time.monotonic() + 2
        while left := [pid for pid in self.ranks.values() if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"{left} live on"
            await asyncio.sleep(0.02)
        return code


def write_config(folder: Path, target: Path, **parallel: object) -> tuple[Path, str]:
    """parallel: the section's keys; `graphs` are the verifier's."""
    graphs = parallel.pop("graphs", {})
    address = f"127.0.0.1:{free_port()}"
    config = {
        "target": str(target),
        "drafter": {"draft_source": "ngram"},
        "verifier": {
            "listen": address,
            "dtype": "float32",
            "kv_blocks": 40,
            "kv_block_tokens": 16,
            "draft_timeout_ms": 5000,
            "warm_up_seconds": 0.1,
            "threads": 1,
            "parallel": parallel,
            "graphs": graphs,
        },
    }
    path = folder / "stack.yaml"
    path.write_text(yaml.safe_dump(config))
    return path, address


@asynccontextmanager
async def running(folder: Path, target: Path, *launcher: str, **parallel: object) -> AsyncIterator[Verifier]:
    config, address = write_config(folder, target, **parallel)
    log = folder / "log"
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *launcher, "-m", "verifier_service", "--config", str(config), stdout=output, stderr=output
        )
    try:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(100):
            while await check_health(address, "tandem.v1.VerifierService", timeout=0.5) != "SERVING":
                assert process.returncode is None
                await asyncio.sleep(0.05)
            yield Verifier(process, channel, log)
    except BaseException:
        print(log.read_text()[-5000:])
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def tokens_of(call: Any) -> list[int]:
    tokens: list[int] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens += message.token_ids
    return tokens


def _block_along(truth: list[int], nodes: int, rng: random.Random) -> Draft:
    """The truth up to a random place, wrong from there on."""
    right = truth[: rng.randrange(nodes + 1)]
    tokens = right + [rng.randrange(VOCAB) for _ in range(nodes - len(right))]
    return Draft.block(tokens, [0.0] * nodes)
