"""Speculation without a draft model: a verifier and n-gram drafters, as processes and over real gRPC."""

import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import yaml

from tandem.cli.parts import parts_of
from tandem.cli.stack import Stack
from tandem.client import AsyncClient, Message
from tandem.config import StackConfig, load_config
from tandem.rpc import field_violations
from tandem.v1 import generation_pb2, speculation_pb2, speculation_pb2_grpc, verification_pb2, verification_pb2_grpc
from tests.fakes.ports import free_ports
from tests.fakes.served_verifier import served_verifier
from tests.fakes.tiny_models import VOCAB, constant_draft, map_target

ROOT = Path(__file__).parents[2]
PERIOD = 12
SUCCESSOR = [(t + 1) % PERIOD if t < PERIOD else t for t in range(VOCAB)]
"""Greedy output goes round in a circle of PERIOD tokens."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    map_target(folder / "target", SUCCESSOR, scale=0.05)
    constant_draft(folder / "draft", mask_token=3)
    return folder


@contextmanager
def process(service: str, path: Path, config: dict[str, Any]) -> Iterator[None]:
    path.write_text(yaml.safe_dump(config))
    log = path.with_suffix(".log")
    with log.open("w") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", service, "--config", str(path)], stderr=output, stdout=output, cwd=ROOT
        )
    try:
        yield
    except BaseException:
        print(log.read_text()[-3000:])
        raise
    finally:
        running.terminate()
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


class Verifier:
    """Calls to a verifier."""

    def __init__(self, channel: grpc.aio.Channel):
        self.generation: Any = verification_pb2_grpc.VerifierServiceStub(channel)
        self.speculation: Any = speculation_pb2_grpc.SpeculationServiceStub(channel)

    async def load(self) -> verification_pb2.GetLoadResponse:
        return await self.generation.GetLoad(verification_pb2.GetLoadRequest(), wait_for_ready=True)

    async def drafters(self, count: int) -> None:
        async with asyncio.timeout(60):
            while (await self.load()).drafters != count:
                await asyncio.sleep(0.05)

    async def tokens(
        self, name: str, mode: "generation_pb2.SpeculationMode.ValueType", prompt: list[int], **sampling: Any
    ) -> tuple[list[int], generation_pb2.SpeculationStats]:
        request = verification_pb2.VerifierServiceGenerateRequest(
            request_id=f"{name}-{mode}",
            token_ids=prompt,
            prompt_length=len(prompt),
            sampling=generation_pb2.SamplingParams(**sampling),
            max_tokens=60,
            speculation_mode=mode,
        )
        found: list[int] = []
        stats = generation_pb2.SpeculationStats()
        async for message in self.generation.Generate(request):
            found += message.token_ids
            stats = message.final.speculation
        return found, stats


OFF, BLOCK = generation_pb2.SPECULATION_MODE_OFF, generation_pb2.SPECULATION_MODE_BLOCK
TREE, AUTO = generation_pb2.SPECULATION_MODE_TREE, generation_pb2.SPECULATION_MODE_AUTO
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0}, *({"temperature": 0.8, "seed": s} for s in range(3))]


async def drafted_equals_plain(
    verifier: Verifier, mode: "generation_pb2.SpeculationMode.ValueType"
) -> list[generation_pb2.SpeculationStats]:
    """Runs prompts at several temperatures plainly and, all at once, drafted; gives the drafted ones' figures."""
    cases = [([5 + i, 6 + i, 7], sampling) for i in range(2) for sampling in SAMPLINGS]
    names = [str(i) for i in range(len(cases))]
    plain = [await verifier.tokens(n, OFF, p, **s) for n, (p, s) in zip(names, cases, strict=True)]
    drafted = await asyncio.gather(*(verifier.tokens(n, mode, p, **s) for n, (p, s) in zip(names, cases, strict=True)))
    assert [ids for ids, _ in drafted] == [ids for ids, _ in plain]
    assert len({tuple(ids) for ids, _ in plain}) > 2
    assert all(stats.drafts == 0 for _, stats in plain)
    return [stats for _, stats in drafted]


async def test_processes_without_a_draft_model_give_the_plain_ids(models: Path, tmp_path: Path) -> None:
    """Verifier and n-gram drafter as processes: the ids of plain decoding at any temperature, in fewer steps."""
    verify, draft = (f"127.0.0.1:{port}" for port in free_ports(2))
    config = {
        "target": str(models / "target"),
        "verifier": {"listen": verify, "dtype": "float32", "threads": 1, "draft_timeout_ms": 5000},
        "drafter": {"listen": draft, "verifier": verify, "draft_source": "ngram"},
    }
    with (
        process("verifier_service", tmp_path / "verifier.yaml", config),
        process("drafter_service", tmp_path / "drafter.yaml", config),
    ):
        async with grpc.aio.insecure_channel(verify) as channel:
            verifier = Verifier(channel)
            await verifier.drafters(1)
            blocks = await drafted_equals_plain(verifier, BLOCK)
            trees = await drafted_equals_plain(verifier, TREE)
            await drafted_equals_plain(verifier, AUTO)
    for greedy in (blocks[0], trees[0]):
        assert greedy.accepted_tokens > 30
        assert greedy.steps < 35
    assert max(len(s.accepted_per_position) for s in blocks) <= 15


async def test_both_kinds_of_drafters_serve_one_verifier(models: Path, tmp_path: Path) -> None:
    """A draft model's drafter and an n-gram one side by side: each gets sequences, and all ids are the plain ones."""
    verify, *others = (f"127.0.0.1:{port}" for port in free_ports(5))
    shared = {"target": str(models / "target"), "draft_model": str(models / "draft")}
    section = {"listen": verify, "dtype": "float32", "threads": 1, "draft_timeout_ms": 5000}
    ngram = {"listen": others[0], "metrics_listen": others[1], "verifier": verify, "draft_source": "ngram"}
    dflash = {"listen": others[2], "metrics_listen": others[3], "verifier": verify, "dtype": "float32", "threads": 1}
    with (
        process("verifier_service", tmp_path / "verifier.yaml", {**shared, "verifier": section}),
        process("drafter_service", tmp_path / "ngram.yaml", {**shared, "drafter": ngram}),
        process("drafter_service", tmp_path / "dflash.yaml", {**shared, "drafter": dflash}),
    ):
        async with grpc.aio.insecure_channel(verify) as channel:
            verifier = Verifier(channel)
            await verifier.drafters(2)
            await drafted_equals_plain(verifier, BLOCK)
        for address in (others[1], others[3]):
            assert metric(address, "tandem_drafter_draft_tokens_total") > 0
            assert metric(address, "tandem_drafter_context_positions_total") > 0


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split(" ")[0] == name)


@pytest_asyncio.fixture
async def verifier(models: Path) -> AsyncIterator[Verifier]:
    """In this process, without a draft model."""
    config = StackConfig.model_validate(
        {
            "target": models / "target",
            "verifier": {"dtype": "float32", "kv_blocks": 40, "kv_block_tokens": 16, "draft_timeout_ms": 20_000},
            "drafter": {"draft_source": "ngram"},
        }
    )
    async with served_verifier(config) as served:
        yield Verifier(served.channel)


async def registered(verifier: Verifier, **changes: Any) -> Any:
    """A stream whose first message is an n-gram drafter's registration, with changes."""
    call = verifier.speculation.Speculate()
    fields = {"protocol_version": 1, "draft_source": speculation_pb2.DRAFT_SOURCE_NGRAM, "vocab_size": VOCAB, **changes}
    await call.write(speculation_pb2.DrafterMessage(registration=speculation_pb2.Registration(**fields)))
    return call


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"vocab_size": 7}, grpc.StatusCode.FAILED_PRECONDITION, ["vocab_size: drafter 7", str(VOCAB)]),
        ({"protocol_version": 3}, grpc.StatusCode.FAILED_PRECONDITION, ["protocol_version"]),
        (
            {"draft_source": speculation_pb2.DRAFT_SOURCE_DFLASH, "draft_model_fingerprint": "abc"},
            grpc.StatusCode.FAILED_PRECONDITION,
            ["draft_model_fingerprint: drafter abc, verifier none"],
        ),
        ({"draft_source": 77}, grpc.StatusCode.INVALID_ARGUMENT, ["registration.draft_source", "dflash or ngram"]),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused(
    verifier: Verifier, changes: dict[str, Any], code: grpc.StatusCode, words: list[str]
) -> None:
    call = await registered(verifier, **changes)
    assert await call.code() is code
    details = str(await call.details())
    assert all(word in details for word in words), details


async def test_an_n_gram_drafter_is_sent_all_tokens_and_no_features(verifier: Verifier) -> None:
    """Positions in order without gaps, each with the sequence's token; the request's anchor is the next one."""
    call = await registered(verifier)
    await call.read()
    running = asyncio.create_task(verifier.tokens("r", BLOCK, [3, 4, 5, 6], temperature=0.0))
    text: list[int] = []
    for _ in range(6):
        while not (work := (await call.read()).round).requests:
            text += read_text(work, len(text))
        text += read_text(work, len(text))
        wanted = work.requests[0]
        assert wanted.base_position == len(text)
        assert wanted.shape == speculation_pb2.DRAFT_SHAPE_BLOCK
        assert wanted.max_nodes <= 15
        assert [*text, wanted.anchor] == [(3 + i) % PERIOD for i in range(len(text) + 1)]
        draft = speculation_pb2.Draft(
            sequence_id=wanted.sequence_id,
            base_position=wanted.base_position,
            tokens=[SUCCESSOR[wanted.anchor]],
            parents=[0],
            log_probs=[0.0],
        )
        await call.write(speculation_pb2.DrafterMessage(drafts=speculation_pb2.DraftBatch(drafts=[draft])))
    call.cancel()
    ids, stats = await running
    assert ids == [(7 + i) % PERIOD for i in range(60)]
    assert stats.accepted_tokens >= 5


def read_text(work: speculation_pb2.Round, held: int) -> list[int]:
    found: list[int] = []
    for context in work.contexts:
        assert context.features == b""
        assert context.start_position == held + len(found)
        assert context.count == len(context.token_ids)
        found += context.token_ids
    return found


async def test_an_empty_draft_is_not_waited_for(verifier: Verifier) -> None:
    """Nothing to propose, at every request: plain steps at once, though the draft timeout is 20 seconds; the drafter is
    not taken for late, so that it is asked at each step."""
    call = await registered(verifier)
    await call.read()
    started = time.monotonic()
    running = asyncio.create_task(verifier.tokens("r", BLOCK, [3, 4, 5, 6], temperature=0.0))
    asked = 0
    while asked < 55:
        for wanted in (await call.read()).round.requests:
            asked += 1
            empty = speculation_pb2.Draft(sequence_id=wanted.sequence_id, base_position=wanted.base_position)
            await call.write(speculation_pb2.DrafterMessage(drafts=speculation_pb2.DraftBatch(drafts=[empty])))
    call.cancel()
    ids, stats = await running
    assert time.monotonic() - started < 15
    assert ids == [(7 + i) % PERIOD for i in range(60)]
    assert (stats.drafts, stats.drafted_tokens) == (0, 0)


async def test_a_draft_of_the_wrong_form_ends_its_drafter(verifier: Verifier) -> None:
    """Tokens missing while parents are there is not an empty draft."""
    call = await registered(verifier)
    await call.read()
    draft = speculation_pb2.Draft(parents=[0])
    await call.write(speculation_pb2.DrafterMessage(drafts=speculation_pb2.DraftBatch(drafts=[draft])))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_violations(error.value)[0][0] == "drafts[0].tokens, parents, log_probs"


@pytest.mark.model
@pytest.mark.slow
async def test_the_demo_target_repeats_a_text_faster(tmp_path: Path) -> None:
    """The whole stack without a draft model: a repetitive answer comes in far fewer steps, and is the plain one."""
    gateway, verify, draft = (f"127.0.0.1:{port}" for port in free_ports(3))
    config = {
        "target": str(ROOT / "models/smollm2-135m-instruct"),
        "gateway": {"listen": gateway, "verifier": verify},
        "verifier": {"listen": verify, "dtype": "float32", "draft_timeout_ms": 5000},
        "drafter": {"listen": draft, "verifier": verify, "draft_source": "ngram"},
    }
    path = tmp_path / "stack.yaml"
    path.write_text(yaml.safe_dump(config))
    lines: list[str] = []
    stack = Stack(parts_of(load_config(path), path), lambda part, line: lines.append(f"{part} | {line}"))
    poem = "The river runs to the sea, the sea goes up to the cloud, the cloud comes down to the hill."
    messages = [Message("user", f"Repeat this text three times, word by word:\n{poem}")]
    try:
        async with stack, AsyncClient(gateway) as client:
            assert (await client.model()).drafters == 1
            answers = {}
            for mode in ("off", "block"):
                generation = client.generate(
                    messages, speculation_mode=mode, temperature=0, max_tokens=60, ignore_eos=True
                )
                final = await generation.result()
                answers[mode] = generation.token_ids, final
    except BaseException:
        print("\n".join(lines[-60:]))
        raise
    assert answers["block"][0] == answers["off"][0]
    assert answers["block"][1].accepted_tokens > 20
    assert answers["block"][1].steps < 45
