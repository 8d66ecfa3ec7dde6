"""The drafter against a scripted verifier over real gRPC."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry

from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.drafter import Drafter
from drafter_service.metrics import DrafterMetrics
from drafter_service.verifier_link import VerifierLink
from tandem.checkpoints.folder import fingerprint
from tandem.rpc import check_health
from tandem.v1 import speculation_pb2 as pb
from tests.fakes.draft_folders import HIDDEN, draft_config, draft_tensors, write_draft, write_target
from tests.fakes.fake_speculation import FakeSpeculation
from tests.fakes.ports import free_ports

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, config = tmp_path_factory.mktemp("folders"), draft_config()
    return write_draft(folder / "draft", config, draft_tensors(config)), write_target(folder / "target")


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> DraftModel:
    return DraftModel.load(*folders, torch.float32, torch.device("cpu"))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def fake() -> AsyncIterator[FakeSpeculation]:
    async with FakeSpeculation() as server:
        yield server


class Linked:
    """A link running in this loop, and what it told."""

    def __init__(self, model: DraftModel, address: str, registry: CollectorRegistry, reconnect_max: float = 0.3):
        metrics = DrafterMetrics(registry)
        self.ready: list[bool] = []
        self.workers: list[Drafter] = []

        def new_worker(dtype: str) -> Drafter:
            self.workers.append(Drafter(model, dtype, metrics))
            return self.workers[-1]

        async def on_registered(ready: bool) -> None:
            self.ready.append(ready)

        registration = pb.Registration(protocol_version=1, drafter_name="under test", block_size=8)
        link = VerifierLink(address, registration, reconnect_max, new_worker, on_registered, metrics)
        self.task = asyncio.create_task(link.run())

    async def leave(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def linked(model: DraftModel, fake: FakeSpeculation, registry: CollectorRegistry) -> AsyncIterator[Linked]:
    link = Linked(model, fake.address, registry)
    yield link
    await link.leave()


def features(sequence: int) -> torch.Tensor:
    return torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(sequence))


def context(sequence: int, start: int, count: int, epoch: int = 0) -> pb.SequenceContext:
    data = features(sequence)[start : start + count].numpy().tobytes()
    return pb.SequenceContext(sequence_id=sequence, epoch=epoch, start_position=start, count=count, features=data)


def request(sequence: int, base: int, epoch: int = 0, max_nodes: int = 7) -> pb.DraftRequest:
    return pb.DraftRequest(sequence_id=sequence, epoch=epoch, base_position=base, anchor=9, max_nodes=max_nodes)


def expected_tokens(model: DraftModel, sequence: int, base: int) -> list[int]:
    kv = model.new_context()
    model.write_context([ContextRows(kv, 0, features(sequence)[:base])])
    return model.draft([BlockRequest(kv, base, 9, 7)])[0].tokens


async def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.01)


async def test_registers_and_drafts(linked: Linked, fake: FakeSpeculation, model: DraftModel) -> None:
    """Registration first; then each round's requests are answered with valid blocks, several rounds in any grouping."""
    stream = await fake.next_stream()
    assert stream.registration.drafter_name == "under test"
    await stream.send(
        pb.Round(contexts=[context(1, 0, 10), context(2, 0, 4)], requests=[request(1, 10), request(2, 4)])
    )
    batch = await stream.drafts()
    assert [(d.sequence_id, d.epoch, d.base_position) for d in batch.drafts] == [(1, 0, 10), (2, 0, 4)]
    for draft in batch.drafts:
        assert list(draft.tokens) == expected_tokens(model, draft.sequence_id, draft.base_position)
        assert list(draft.parents) == list(range(7))
        assert len(draft.log_probs) == 7
    assert batch.compute_us > 0

    await stream.send(*(pb.Round(contexts=[context(n, 0, n)], requests=[request(n, n)]) for n in range(3, 9)))
    answered: dict[int, list[int]] = {}
    while len(answered) < 6:
        answered |= {d.sequence_id: list(d.tokens) for d in (await stream.drafts()).drafts}
    assert answered == {n: expected_tokens(model, n, n) for n in range(3, 9)}
    assert linked.ready == [True]


async def test_gap_is_asked_for_and_filled(linked: Linked, fake: FakeSpeculation, model: DraftModel) -> None:
    """A request without its features gets a ContextGap; the features sent again, it gets its draft."""
    stream = await fake.next_stream()
    await stream.send(pb.Round(contexts=[context(1, 0, 3)]), pb.Round(contexts=[context(1, 5, 2)]))
    gap = await stream.gap()
    assert (gap.sequence_id, gap.epoch, gap.held_positions) == (1, 0, 3)
    await stream.send(pb.Round(contexts=[context(1, 3, 4)], requests=[request(1, 7)]))
    assert list((await stream.drafts()).drafts[0].tokens) == expected_tokens(model, 1, 7)


async def test_reconnects_after_the_verifier_died(
    linked: Linked, fake: FakeSpeculation, model: DraftModel, registry: CollectorRegistry
) -> None:
    """A new verifier at the address gets a new registration, and nothing of the old stream's contexts is used."""
    stream = await fake.next_stream()
    await stream.send(pb.Round(contexts=[context(1, 0, 10)], requests=[request(1, 10)]))
    await stream.drafts()
    await fake.stop()
    await eventually(lambda: linked.ready == [True, False])
    assert registry.get_sample_value("tandem_drafter_registered") == 0
    assert registry.get_sample_value("tandem_drafter_sequences") == 0
    await asyncio.sleep(0.3)
    async with FakeSpeculation(fake.address) as back:
        stream = await back.next_stream()
        await stream.send(pb.Round(requests=[request(1, 10)]))
        assert (await stream.gap()).held_positions == 0
        await stream.send(pb.Round(contexts=[context(1, 0, 10)], requests=[request(1, 10)]))
        assert list((await stream.drafts()).drafts[0].tokens) == expected_tokens(model, 1, 10)
        assert linked.ready == [True, False, True]
        assert registry.get_sample_value("tandem_drafter_registered") == 1
        assert (registry.get_sample_value("tandem_drafter_reconnects_total") or 0) >= 1


async def test_waits_for_a_verifier_that_is_not_there_yet(
    model: DraftModel, registry: CollectorRegistry, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The drafter may start first; it says what it waits for, once."""
    address = f"127.0.0.1:{free_port}"
    link = Linked(model, address, registry)
    await eventually(lambda: (registry.get_sample_value("tandem_drafter_reconnects_total") or 0) >= 3)
    assert len([r for r in caplog.records if address in r.getMessage() and "UNAVAILABLE" in r.getMessage()]) == 1
    async with FakeSpeculation(address) as fake:
        await fake.next_stream()
        await eventually(lambda: link.ready == [True])
        await link.leave()


async def test_refused_registration_is_reported_and_retried(
    linked: Linked, model: DraftModel, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """The verifier's reason is logged as an error; the drafter keeps asking, and serves once it is taken."""
    await linked.leave()
    async with FakeSpeculation(refusal="block_size: drafter 8, verifier 16") as fake:
        link = Linked(model, fake.address, CollectorRegistry())
        await eventually(lambda: len(fake.registrations) >= 3)
        errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert len(errors) == 1
        assert "FAILED_PRECONDITION: block_size: drafter 8, verifier 16" in errors[0]
        assert link.ready == []
        fake.refusal = None
        await fake.next_stream()
        await eventually(lambda: link.ready == [True])
        await link.leave()


async def test_stops_at_any_moment_of_registering(
    model: DraftModel, fake: FakeSpeculation, registry: CollectorRegistry
) -> None:
    """A stop that coincides with the verifier's answer is not lost."""
    for turns in range(8):
        link = Linked(model, fake.address, CollectorRegistry())
        await fake.next_stream()
        time.sleep(0.02)  # The answer arrives while the loop is held up, to be noticed in its next turns.
        for _ in range(turns):
            await asyncio.sleep(0)
        link.task.cancel()
        _, running = await asyncio.wait([link.task], timeout=3)
        assert not running, turns


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            pb.VerifierMessage(round=pb.Round(contexts=[pb.SequenceContext(count=3, features=b"123")])),
            "contexts.features",
        ),
        (pb.VerifierMessage(round=pb.Round(requests=[pb.DraftRequest(anchor=99999, max_nodes=1)])), "requests.anchor"),
        (pb.VerifierMessage(round=pb.Round(requests=[pb.DraftRequest(anchor=1)])), "requests.max_nodes"),
        (pb.VerifierMessage(registered=pb.Registered()), "expected a round"),
        (pb.VerifierMessage(), "expected a round"),
    ],
)
async def test_protocol_errors_end_the_stream_and_are_logged(
    message: pb.VerifierMessage, says: str, linked: Linked, fake: FakeSpeculation, caplog: pytest.LogCaptureFixture
) -> None:
    """A verifier that breaks the protocol loses the stream; the drafter says which field, and registers anew."""
    stream = await fake.next_stream()
    await stream.send_message(message)
    await fake.next_stream()
    assert any("protocol error" in r.getMessage() and says in r.getMessage() for r in caplog.records)


async def test_failure_of_the_work_does_not_end_the_drafter(
    linked: Linked, fake: FakeSpeculation, model: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, say: the stream and its contexts go, the drafter comes back."""
    stream = await fake.next_stream()
    with monkeypatch.context() as patch:
        patch.setattr(model, "draft", lambda blocks: (_ for _ in ()).throw(RuntimeError("out of memory")))
        await stream.send(pb.Round(contexts=[context(1, 0, 4)], requests=[request(1, 4)]))
        stream = await fake.next_stream()
    await stream.send(pb.Round(contexts=[context(1, 0, 4)], requests=[request(1, 4)]))
    assert list((await stream.drafts()).drafts[0].tokens) == expected_tokens(model, 1, 4)


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.INTERNAL])
async def test_registers_anew_when_the_verifier_ends_the_stream(
    code: grpc.StatusCode, linked: Linked, fake: FakeSpeculation
) -> None:
    """However the stream ends."""
    await (await fake.next_stream()).end(code, "over")
    await fake.next_stream()
    await eventually(lambda: linked.ready == [True, False, True])


async def test_leaves_in_order(linked: Linked, fake: FakeSpeculation) -> None:
    """Told to stop, the drafter half-closes: the verifier sees an end, not a broken stream."""
    stream = await fake.next_stream()
    await eventually(lambda: linked.ready == [True])
    await linked.leave()
    assert stream.half_closed.is_set()
    assert linked.ready == [True, False]


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


def start_process(folder: Path, yaml: str) -> subprocess.Popen[str]:
    (folder / "stack.yaml").write_text(yaml)
    command = [sys.executable, "-m", "drafter_service", "--config", str(folder / "stack.yaml")]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def stack(folders: tuple[Path, Path], **drafter: object) -> str:
    draft, target = folders
    section = "".join(f"  {key}: {value}\n" for key, value in drafter.items())
    return f"target: {target}\ndraft_model: {draft}\ndrafter:\n  dtype: float32\n{section}"


async def test_process_serves_health_and_leaves_on_sigterm(
    folders: tuple[Path, Path], model: DraftModel, fake: FakeSpeculation, free_port: int, tmp_path: Path
) -> None:
    """The whole service: health follows the registration, drafts are right, SIGTERM ends stream and process."""
    listen = f"127.0.0.1:{free_port}"
    process = start_process(tmp_path, stack(folders, listen=listen, verifier=fake.address, name="one", threads=1))
    try:
        async with asyncio.timeout(60):
            stream = await _first_stream(fake, process)
        registration = stream.registration
        assert registration.draft_model_fingerprint == fingerprint(folders[0])
        assert (registration.protocol_version, registration.block_size, registration.vocab_size) == (1, 8, 512)
        assert (list(registration.target_layer_ids), registration.hidden_size) == ([1, 4, 7], HIDDEN)
        assert registration.drafter_name == "one"
        await stream.send(pb.Round(contexts=[context(1, 0, 6)], requests=[request(1, 6)]))
        assert list((await stream.drafts()).drafts[0].tokens) == expected_tokens(model, 1, 6)
        assert await check_health(listen, "tandem.Drafter") == "SERVING"

        await stream.end(grpc.StatusCode.UNAVAILABLE, "going away")
        fake.refusal = "not now"
        await _health_becomes(listen, "NOT_SERVING")
        assert await check_health(listen, "") == "SERVING"
        fake.refusal = None
        stream = await fake.next_stream()
        await _health_becomes(listen, "SERVING")

        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            await stream.half_closed.wait()
            assert await asyncio.to_thread(process.wait) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("draft_model", "# draft_model"), "draft_model: the drafter needs one"),
        (lambda text: text.replace("threads: 1", "colour: red"), "drafter.colour: unknown key"),
        (lambda text: text.replace("device: cpu", "device: cuda"), "drafter.device: cuda"),
    ],
)
def test_wrong_config_is_one_line_and_exit_2(
    change: Callable[[str], str], says: str, folders: tuple[Path, Path], free_port: int, tmp_path: Path
) -> None:
    """A drafter that cannot start says why in one line and exits 2."""
    text = change(stack(folders, listen=f"127.0.0.1:{free_port}", threads=1, device="cpu"))
    process = start_process(tmp_path, text)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    lines = [line for line in stderr.splitlines() if line.startswith("drafter: ")]
    assert len(lines) == 1
    assert says in lines[0]
    assert "Traceback" not in stderr


async def _first_stream(fake: FakeSpeculation, process: "subprocess.Popen[str]") -> Any:
    while True:
        assert process.poll() is None, process.communicate()[1]
        with contextlib.suppress(TimeoutError):
            return await fake.next_stream()


async def _health_becomes(listen: str, status: str) -> None:
    async with asyncio.timeout(10):
        while await check_health(listen, "tandem.Drafter") != status:
            await asyncio.sleep(0.05)
