"""A verifier over several real processes: emits what one would, and ends as a whole, with the reason, when one dies."""

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandem.rpc import check_health, retry_after_seconds
from tandem.v1 import generation_pb2, speculation_pb2, speculation_pb2_grpc, verification_pb2, verification_pb2_grpc
from tests.fakes.ports import free_port
from tests.fakes.random_targets import random_architecture
from tests.fakes.trees import tree_around

pytestmark = pytest.mark.slow

VOCAB = 512
PROMPT = [(37 * i + 11) % VOCAB for i in range(20)]
COUNT = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A mixture of 8 experts with 8 heads: splits over 2, 4 and 8 ranks."""
    folder = tmp_path_factory.mktemp("target")
    return folder, random_architecture(folder, "mixtral", eos_token_id=None)


@pytest.fixture(scope="module")
def truth(target: tuple[Path, PreTrainedModel]) -> list[int]:
    """Prompt and greedy continuation, by transformers."""
    tokens = list(PROMPT)
    with torch.inference_mode():
        while len(tokens) < len(PROMPT) + COUNT:
            tokens.append(int(target[1](torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


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

    def generate(self, max_tokens: int = COUNT, mode: int = generation_pb2.SPECULATION_MODE_TREE) -> Any:
        return self.generation.Generate(
            verification_pb2.VerifierServiceGenerateRequest(
                request_id=str(random.random()),
                token_ids=PROMPT,
                prompt_length=len(PROMPT),
                sampling=generation_pb2.SamplingParams(temperature=0.0),
                max_tokens=max_tokens,
                speculation_mode=mode,
            )
        )

    async def ended(self, seconds: float) -> int:
        """The exit code; no rank outlives it."""
        code = await asyncio.wait_for(self.process.wait(), seconds)
        deadline = time.monotonic() + 2
        while left := [pid for pid in self.ranks.values() if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"{left} live on"
            await asyncio.sleep(0.02)
        return code


def write_config(folder: Path, target: Path, **parallel: object) -> tuple[Path, str]:
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


async def draft(verifier: Verifier, truth: list[int]) -> None:
    """A drafter whose trees hold the truth among wrong nodes, so that accepted rows lie apart and move."""
    call = verifier.speculation.Speculate()
    registration = speculation_pb2.Registration(
        protocol_version=1, vocab_size=VOCAB, draft_source=speculation_pb2.DRAFT_SOURCE_NGRAM, drafter_name="test"
    )
    await call.write(speculation_pb2.DrafterMessage(registration=registration))
    rng = random.Random(0)
    while (message := await call.read()) is not grpc.aio.EOF:
        for asked in message.round.requests:
            ahead = truth[asked.base_position + 1 :]
            tree = tree_around(ahead, min(8, asked.max_nodes), VOCAB, rng)
            answer = speculation_pb2.Draft(
                sequence_id=asked.sequence_id,
                epoch=asked.epoch,
                base_position=asked.base_position,
                tokens=tree.tokens,
                parents=tree.parents,
                log_probs=tree.log_probs,
            )
            await call.write(speculation_pb2.DrafterMessage(drafts=speculation_pb2.DraftBatch(drafts=[answer])))


async def tokens_of(call: Any) -> list[int]:
    tokens: list[int] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens += message.token_ids
    return tokens


@pytest.mark.parametrize(
    "parallel", [{"ep": 2, "tp": 2, "experts": "cut"}, {"ep": 8}], ids=["2 ranks, all split", "8 ranks"]
)
async def test_ranks_emit_what_the_target_alone_would_and_end_at_sigterm(
    tmp_path: Path, target: tuple[Path, PreTrainedModel], truth: list[int], parallel: dict[str, object]
) -> None:
    """Plainly and with trees, whose accepted rows move in every rank's KV; a call in flight at SIGTERM is finished."""
    async with running(tmp_path, target[0], **parallel) as verifier:
        plain = generation_pb2.SPECULATION_MODE_OFF
        assert PROMPT + await tokens_of(verifier.generate(mode=plain)) == truth
        drafting = asyncio.create_task(draft(verifier, truth))
        load = verification_pb2.GetLoadRequest()
        while not (await verifier.generation.GetLoad(load)).drafters:
            await asyncio.sleep(0.01)
        assert PROMPT + await tokens_of(verifier.generate()) == truth
        assert (await verifier.generation.GetLoad(load)).accepted_tokens > COUNT / 4
        drafting.cancel()
        last = verifier.generate(mode=plain)
        await last.read()
        verifier.process.send_signal(signal.SIGTERM)
        rest = await tokens_of(last)
        assert truth[-len(rest) :] == rest
        assert await verifier.ended(10) == 0


@pytest.mark.parametrize("busy", [True, False], ids=["in a step", "idle"])
async def test_a_killed_rank_ends_the_verifier_and_is_named(
    tmp_path: Path, target: tuple[Path, PreTrainedModel], busy: bool
) -> None:
    """Within 10 s, exit code 1; streams end with UNAVAILABLE and a retry hint."""
    async with running(tmp_path, target[0], ep=4) as verifier:
        call = verifier.generate(max_tokens=500)
        if busy:
            await call.read()
        else:
            call.cancel()
        killed = time.monotonic()
        os.kill(verifier.ranks[2], signal.SIGKILL)
        if busy:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await tokens_of(call)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "rank 2" in str(error.value.details())
            assert retry_after_seconds(error.value) == 1.0
        assert await verifier.ended(10) == 1
        assert time.monotonic() - killed < 10
        assert "rank 2 is gone: killed by SIGKILL" in verifier.log
        assert "Traceback" not in verifier.log


async def test_a_rank_that_cannot_load_ends_the_start_up_and_is_named(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    """Exit code 2 and one line with the rank, the file and the tensor; rank 0 alone would have started."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((target[0] / "config.json").read_bytes())
    tensors = load_file(target[0] / "model.safetensors")
    (last,) = [name for name in tensors if name.endswith("layers.1.block_sparse_moe.experts.7.w1.weight")]
    del tensors[last]
    save_file(tensors, broken / "model.safetensors")
    config, _ = write_config(tmp_path, broken, ep=2)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "verifier_service", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    lines = [line for line in errors.decode().splitlines() if not line.startswith("20")]
    assert len(lines) == 1
    assert all(word in lines[0] for word in ("verifier: rank 1:", last, "missing")), lines[0]


async def test_torchrun_starts_the_ranks(
    tmp_path: Path, target: tuple[Path, PreTrainedModel], truth: list[int]
) -> None:
    """As on several nodes: the ranks find each other by the standard variables."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    async with running(tmp_path, target[0], *launcher, ep=2) as verifier:
        call = verifier.generate(mode=generation_pb2.SPECULATION_MODE_OFF)
        assert PROMPT + await tokens_of(call) == truth
        verifier.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(verifier.process.wait(), 30)
