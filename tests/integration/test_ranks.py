"""A verifier over several real processes: emits what one would, and ends as a whole, with the reason, when one dies."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandem.rpc import retry_after_seconds
from tandem.v1 import generation_pb2
from tests.fakes.ports import free_port
from tests.fakes.random_targets import random_architecture
from tests.fakes.rank_processes import PROMPT, running, tokens_of, write_config

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(
    "parallel",
    [
        {"ep": 2, "tp": 2, "experts": "cut"},
        {"ep": 2, "tp": 2, "graphs": {"mode": "on", "max_rows": 64}},
        {"ep": 8},
    ],
    ids=["2 ranks, all split", "2 ranks, steps of fixed shape", "8 ranks"],
)
async def test_ranks_emit_what_the_target_alone_would_and_end_at_sigterm(
    tmp_path: Path, target: tuple[Path, PreTrainedModel], truth: list[int], parallel: dict[str, object]
) -> None:
    """Plainly and with trees, whose accepted rows move in every rank's KV; a call in flight at SIGTERM is finished."""
    async with running(tmp_path, target[0], **parallel) as verifier:
        plain = generation_pb2.SPECULATION_MODE_OFF
        assert PROMPT + await tokens_of(verifier.generate(mode=plain)) == truth
        async with verifier.drafted(truth):
            assert PROMPT + await tokens_of(verifier.generate()) == truth
            assert (await verifier.load()).accepted_tokens > COUNT / 4
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
