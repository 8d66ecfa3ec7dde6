"""The verifier over real gRPC: bad requests name their field, bad drafters cannot hurt, nothing stays behind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from tandem.config import StackConfig
from tandem.rpc import INTERNAL_MESSAGE_BYTES, field_violations
from tandem.v1 import generation_pb2, speculation_pb2, speculation_pb2_grpc, verification_pb2, verification_pb2_grpc
from tests.fakes.served_verifier import served_verifier
from tests.fakes.tiny_models import VOCAB, constant_draft, map_target
from verifier_service.engine import Engine
from verifier_service.speculation_servicer import SpeculationInfo

LOOP = 7
"""The token whose successor is itself; the draft model proposes it everywhere."""
MASK = 500

SUCCESSOR = [(t + 1) % 400 for t in range(VOCAB)]
SUCCESSOR[LOOP] = LOOP
SUCCESSOR[MASK] = LOOP

Request = verification_pb2.VerifierServiceGenerateRequest


@dataclass
class Service:
    engine: Engine
    info: SpeculationInfo
    generation: "verification_pb2_grpc.VerifierServiceAsyncStub"
    speculation: "speculation_pb2_grpc.SpeculationServiceAsyncStub"

    async def load(self) -> verification_pb2.GetLoadResponse:
        return await self.generation.GetLoad(verification_pb2.GetLoadRequest())

    async def until(self, condition: object) -> None:
        async with asyncio.timeout(10):
            while not condition(await self.load()):  # type: ignore[operator]
                await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return map_target(root / "target", SUCCESSOR), constant_draft(root / "draft", MASK)


@pytest_asyncio.fixture
async def service(folders: tuple[Path, Path]) -> AsyncIterator[Service]:
    target, draft = folders
    config = StackConfig.model_validate(
        {
            "target": target,
            "draft_model": draft,
            "verifier": {
                "dtype": "float32",
                "kv_blocks": 40,
                "kv_block_tokens": 16,
                "draft_timeout_ms": 5000,
                "speculation_mode": "block",
                "max_draft_nodes": 16,
                "warm_up_seconds": 0.1,
            },
        }
    )
    async with served_verifier(config) as served:
        service = Service(
            served.engine,
            served.speculation,
            verification_pb2_grpc.VerifierServiceStub(served.channel),  # type: ignore[arg-type]
            speculation_pb2_grpc.SpeculationServiceStub(served.channel),  # type: ignore[arg-type]
        )
        yield service
        await service.until(lambda load: load.running_sequences + load.kv_blocks_used == 0)


def request(**changes: object) -> Request:
    values: dict[str, object] = {
        "request_id": "r",
        "token_ids": [LOOP],
        "prompt_length": 1,
        "sampling": generation_pb2.SamplingParams(temperature=0.0),
        "max_tokens": 24,
        **changes,
    }
    return Request(**values)  # type: ignore[arg-type]


async def tokens_of(service: Service, **changes: object) -> list[int]:
    found: list[int] = []
    finals = 0
    async for message in service.generation.Generate(request(**changes)):
        assert not finals, "a message after the last"
        found += message.token_ids
        finals += message.HasField("final")
    assert finals == 1
    return found


class DrafterPeer:
    """A drafter driven by the test."""

    def __init__(self, service: Service, **changes: object):
        info = service.info
        self.registration = speculation_pb2.Registration(
            protocol_version=1,
            draft_model_fingerprint=info.draft_model_fingerprint,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            target_layer_ids=info.target_layer_ids,
            hidden_size=info.hidden_size,
            drafter_name="peer",
        )
        self.registration.MergeFrom(speculation_pb2.Registration(**changes))  # type: ignore[arg-type]
        self.call = service.speculation.Speculate()

    async def register(self) -> speculation_pb2.Registered:
        await self.call.write(speculation_pb2.DrafterMessage(registration=self.registration))
        return (await self.call.read()).registered

    async def next_request(self) -> speculation_pb2.DraftRequest:
        while True:
            message = await self.call.read()
            if message.round.requests:
                return message.round.requests[0]

    async def answer(self, to: speculation_pb2.DraftRequest, tokens: list[int], **changes: object) -> None:
        values: dict[str, object] = {
            "sequence_id": to.sequence_id,
            "epoch": to.epoch,
            "base_position": to.base_position,
            "tokens": tokens,
            "parents": list(range(len(tokens))),
            "log_probs": [0.0] * len(tokens),
            **changes,
        }
        drafts = speculation_pb2.DraftBatch(drafts=[speculation_pb2.Draft(**values)])  # type: ignore[arg-type]
        await self.call.write(speculation_pb2.DrafterMessage(drafts=drafts))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, VOCAB]}, "token_ids[1]"),
        ({"prompt_length": 0}, "prompt_length"),
        ({"prompt_length": 2}, "prompt_length"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"token_ids": [1, 2, 3], "max_tokens": 2}, "token_ids"),
        ({"sampling": generation_pb2.SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": generation_pb2.SamplingParams(temperature=0.5)}, "sampling.seed"),
        ({"sampling": generation_pb2.SamplingParams(temperature=0, top_p=0)}, "sampling.top_p"),
        ({"speculation_mode": 99}, "speculation_mode"),
        ({"max_draft_nodes": 0}, "max_draft_nodes"),
        ({"max_draft_nodes": 17}, "max_draft_nodes"),
    ],
)
async def test_a_bad_request_is_refused_by_field(service: Service, changes: dict[str, object], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await tokens_of(service, **changes)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in [name for name, _ in field_violations(error.value)]
    assert await tokens_of(service) == [LOOP] * 24


async def test_the_map_target_follows_its_map(service: Service) -> None:
    assert await tokens_of(service, token_ids=[20], max_tokens=5) == [21, 22, 23, 24, 25]
    assert await tokens_of(service, token_ids=[20], stop_token_ids=[23]) == [21, 22, 23]


async def test_cancelling_a_call_frees_its_blocks(service: Service) -> None:
    call = service.generation.Generate(request(max_tokens=250))
    await call.read()
    call.cancel()
    await service.until(lambda load: load.running_sequences == 0 and load.kv_blocks_used == 0)


async def test_info_names_the_modes_and_the_node_limit(service: Service) -> None:
    info = await service.generation.GetInfo(verification_pb2.GetInfoRequest())
    assert info.max_draft_nodes == 16
    assert info.default_speculation_mode == generation_pb2.SPECULATION_MODE_BLOCK
    assert list(info.speculation_modes) == [
        generation_pb2.SPECULATION_MODE_OFF,
        generation_pb2.SPECULATION_MODE_BLOCK,
        generation_pb2.SPECULATION_MODE_TREE,
        generation_pb2.SPECULATION_MODE_AUTO,
    ]


@pytest.mark.parametrize(
    ("changes", "shape", "nodes"),
    [
        ({}, speculation_pb2.DRAFT_SHAPE_BLOCK, 7),
        ({"max_draft_nodes": 3}, speculation_pb2.DRAFT_SHAPE_BLOCK, 3),
        ({"speculation_mode": generation_pb2.SPECULATION_MODE_TREE}, speculation_pb2.DRAFT_SHAPE_TREE, 16),
        (
            {"speculation_mode": generation_pb2.SPECULATION_MODE_TREE, "max_draft_nodes": 5},
            speculation_pb2.DRAFT_SHAPE_TREE,
            5,
        ),
        (
            {"speculation_mode": generation_pb2.SPECULATION_MODE_AUTO, "max_draft_nodes": 5},
            speculation_pb2.DRAFT_SHAPE_TREE,
            5,
        ),
    ],
)
async def test_a_request_says_what_is_drafted_for_it(
    service: Service, changes: dict[str, object], shape: int, nodes: int
) -> None:
    """Mode and node limit of the request are those of the draft that is asked for."""
    peer = DrafterPeer(service)
    await peer.register()
    running = asyncio.create_task(tokens_of(service, **changes))
    wanted = await peer.next_request()
    assert (wanted.shape, wanted.max_nodes) == (shape, nodes)
    peer.call.cancel()
    assert await running == [LOOP] * 24


async def test_a_tree_is_verified_along_its_right_branch(service: Service) -> None:
    """A wrong node before the right one, at the same depth, costs nothing."""
    peer = DrafterPeer(service)
    await peer.register()
    running = asyncio.create_task(
        tokens_of(service, max_tokens=9, speculation_mode=generation_pb2.SPECULATION_MODE_TREE)
    )
    await peer.answer(await peer.next_request(), [1, LOOP, LOOP, 2], parents=[0, 0, 2, 2])
    await peer.next_request()
    peer.call.cancel()
    assert await running == [LOOP] * 9
    load = await service.load()
    assert (load.drafts, load.drafted_tokens, load.accepted_tokens) == (1, 4, 2)


async def test_load_tells_the_controllers_choice(service: Service) -> None:
    assert (await service.load()).speculation.reason == "no drafter"
    peer = DrafterPeer(service)
    await peer.register()
    await service.until(lambda load: load.drafters == 1)
    assert (await service.load()).speculation.reason == "learning"
    peer.call.cancel()
    await service.until(lambda load: load.drafters == 0)


async def test_abort_ends_the_call_as_cancelled(service: Service) -> None:
    call = service.generation.Generate(request(max_tokens=250))
    await call.read()
    await service.generation.Abort(verification_pb2.AbortRequest(request_ids=["r", "unknown"]))
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    assert await call.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"vocab_size": 7}, ["vocab_size", "7", str(VOCAB)]),
        ({"target_layer_ids": [1]}, ["target_layer_ids", "(0, 1, 1)", "(0, 1)"]),
        ({"hidden_size": 64}, ["hidden_size", "64", "128"]),
        ({"block_size": 4}, ["block_size", "4", "8"]),
        ({"protocol_version": 2}, ["protocol_version", "2", "1"]),
        ({"draft_model_fingerprint": "other"}, ["draft_model_fingerprint", "other"]),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_with_both_values(
    service: Service, changes: dict[str, object], names: list[str]
) -> None:
    peer = DrafterPeer(service, **changes)
    with pytest.raises(grpc.aio.AioRpcError):
        await peer.register()
    assert await peer.call.code() is grpc.StatusCode.FAILED_PRECONDITION
    details = str(await peer.call.details())
    assert all(name in details for name in names)
    assert (await service.load()).drafters == 0


async def test_a_drafters_first_message_must_be_its_registration(service: Service) -> None:
    call = service.speculation.Speculate()
    await call.write(speculation_pb2.DrafterMessage(drafts=speculation_pb2.DraftBatch()))
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("tokens", "changes", "field"),
    [
        ([1, VOCAB], {}, "drafts[0].tokens[1]"),
        ([1, 2], {"parents": [0, 5]}, "drafts[0].parents[1]"),
        ([1] * 17, {}, "drafts[0].tokens"),
        ([1, 2], {"log_probs": []}, "drafts[0].tokens, parents, log_probs"),
    ],
)
async def test_a_broken_draft_ends_its_drafter_and_not_the_stream(
    service: Service, tokens: list[int], changes: dict[str, object], field: str
) -> None:
    peer = DrafterPeer(service)
    await peer.register()
    running = asyncio.create_task(tokens_of(service))
    await peer.answer(await peer.next_request(), tokens, **changes)
    assert await peer.call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in str(await peer.call.details())
    assert await running == [LOOP] * 24


@pytest.mark.parametrize("changes", [{"epoch": 3}, {"base_position": 99}, {"sequence_id": 4711}])
async def test_a_stale_draft_is_dropped_and_the_right_one_used(service: Service, changes: dict[str, object]) -> None:
    peer = DrafterPeer(service)
    await peer.register()
    running = asyncio.create_task(tokens_of(service, max_tokens=9))
    wanted = await peer.next_request()
    await peer.answer(wanted, [1] * 7, **changes)
    await peer.answer(wanted, [LOOP] * 7)
    assert await running == [LOOP] * 9
    load = await service.load()
    assert (load.drafts, load.accepted_tokens) == (1, 7)
    peer.call.cancel()
    await service.until(lambda load: load.drafters == 0)


async def test_features_of_a_long_prompt_come_in_pieces_and_in_order(service: Service) -> None:
    peer = DrafterPeer(service)
    registered = await peer.register()
    assert registered.feature_dtype == speculation_pb2.FEATURE_DTYPE_FLOAT32
    running = asyncio.create_task(tokens_of(service, token_ids=[LOOP] * 200, prompt_length=200, max_tokens=3))
    position = 0
    while position < 200:
        message = await peer.call.read()
        for context in message.round.contexts:
            assert context.start_position == position
            assert len(context.features) == context.count * 128 * 4
            position += context.count
        assert message.ByteSize() < INTERNAL_MESSAGE_BYTES
    peer.call.cancel()
    assert await running == [LOOP] * 3


async def test_a_drafter_that_vanishes_does_not_stall_the_stream(service: Service) -> None:
    peer = DrafterPeer(service)
    await peer.register()
    running = asyncio.create_task(tokens_of(service))
    await peer.next_request()
    peer.call.cancel()
    async with asyncio.timeout(3):
        assert await running == [LOOP] * 24
