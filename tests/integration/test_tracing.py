"""One request is one trace over gateway, verifier and drafter; what is not sampled, and what is off, costs nothing."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import tandem.tracing
from drafter_service.app import _ngram
from drafter_service.metrics import DrafterMetrics
from drafter_service.verifier_link import VerifierLink
from gateway.app import Gateway
from tandem.config import StackConfig, TracingConfig
from tandem.errors import StartupError
from tandem.rpc import channel_options, check_health
from tandem.spans import start_tracing
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tests.fakes import tokenizers
from tests.fakes.ports import free_port
from tests.fakes.served_verifier import served_verifier
from tests.fakes.tiny_models import VOCAB, map_target

PERIOD = 12
SUCCESSOR = [(t + 1) % PERIOD if t < PERIOD else t for t in range(VOCAB)]
"""Greedy output goes round in a circle, which n-grams propose."""
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"
PROMPT = [*range(PERIOD)] * 3
TOKENS = 40
WORDS = {"chat", "text_completion", "target", "tree", "default", "length", "drafted", "InvalidRequest"}
"""All strings that attributes may hold here."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = map_target(tmp_path_factory.mktemp("models") / "target", SUCCESSOR)
    config = (folder / "config.json").read_text()
    tokenizers.write_target(folder)
    (folder / "config.json").write_text(config)
    return folder


@dataclass
class Stack:
    """All three services in this process, over real gRPC. Spans are whole once it has ended."""

    stub: Any
    exporters: list[InMemorySpanExporter]

    async def generate(self, traceparent: str | None = None, **fields: Any) -> None:
        request = generation_pb2.GenerateRequest(
            token_ids=PROMPT,
            stopping=generation_pb2.StoppingParams(max_tokens=TOKENS, ignore_eos=True),
            sampling=generation_pb2.SamplingParams(temperature=0),
            speculation_mode=generation_pb2.SPECULATION_MODE_TREE,
        )
        request.MergeFrom(generation_pb2.GenerateRequest(**fields))
        metadata = [("traceparent", traceparent)] if traceparent else []
        async for _ in self.stub.Generate(request, metadata=metadata):
            pass

    @property
    def spans(self) -> list[ReadableSpan]:
        return [span for exporter in self.exporters for span in exporter.get_finished_spans()]


@contextlib.asynccontextmanager
async def stack(target: Path, monkeypatch: pytest.MonkeyPatch, **tracing: Any) -> AsyncIterator[Stack]:
    exporters: list[InMemorySpanExporter] = []

    def exporter(*_: Any, **__: Any) -> InMemorySpanExporter:
        exporters.append(InMemorySpanExporter())
        return exporters[-1]

    monkeypatch.setattr(tandem.tracing, "OTLPSpanExporter", exporter)
    config: dict[str, Any] = {
        "target": target,
        "tracing": {"endpoint": "http://127.0.0.1:4317", **tracing},
        "verifier": {"dtype": "float32", "kv_blocks": 40, "kv_block_tokens": 16, "warm_up_seconds": 0.0},
        "drafter": {"draft_source": "ngram"},
    }
    config["verifier"] |= {"draft_timeout_ms": 5000}
    async with served_verifier(StackConfig.model_validate(config)) as verifier:
        config["gateway"] = {"listen": "127.0.0.1:0", "verifier": verifier.address}
        whole = StackConfig.model_validate(config)
        drafter_tracing = start_tracing(whole.tracing, "drafter")
        metrics = DrafterMetrics(CollectorRegistry())
        source, registered = _ngram(whole, metrics), asyncio.Event()

        async def on_registered(ready: bool) -> None:
            registered.set()

        link = asyncio.create_task(
            VerifierLink(
                verifier.address,
                source.registration,
                1.0,
                source.new_worker,
                on_registered,
                metrics,
                tracing=drafter_tracing,
            ).run()
        )
        gateway = Gateway(whole, poll_seconds=0.05)
        await gateway.start()
        address = f"127.0.0.1:{gateway.port}"
        try:
            async with grpc.aio.insecure_channel(address, options=channel_options()) as channel, asyncio.timeout(30):
                await registered.wait()
                while await check_health(address, "tandem.v1.GenerationService") != "SERVING":
                    await asyncio.sleep(0.02)
                yield Stack(generation_pb2_grpc.GenerationServiceStub(channel), exporters)
        finally:
            await gateway.stop()
            link.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await link
            assert drafter_tracing
            await drafter_tracing.close()


def named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def id_of(span: ReadableSpan) -> int:
    assert span.context
    return span.context.span_id


def is_below(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == id_of(parent)


async def test_a_request_is_one_trace_over_three_services(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the caller's span; with the tree of spans that the documentation draws, and no text and no ids in any."""
    async with stack(target, monkeypatch, sample_rate=0, verify_step_sample_rate=1) as running:
        await running.generate(SAMPLED)
    spans = running.spans
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE}
    (request,) = named(spans, "text_completion target")
    (sequence,) = named(spans, "tandem.sequence")
    assert request.parent
    assert f"{request.parent.span_id:016x}" == CALLER
    assert is_below(sequence, request)
    children = {name: named(spans, f"tandem.{name}") for name in ("queue", "prefill", "verify_step", "draft_round")}
    assert all(is_below(span, sequence) for group in children.values() for span in group)
    assert len(children["queue"]) == len(children["prefill"]) == 1
    rounds, drafts = children["draft_round"], named(spans, "tandem.draft")
    assert rounds
    assert sorted(id_of(round_) for round_ in rounds) == sorted(d.parent.span_id for d in drafts if d.parent)
    services = {span.name: span.resource.attributes["service.name"] for span in spans}
    assert services["text_completion target"] == "tandem-gateway"
    assert services["tandem.verify_step"] == services["tandem.draft_round"] == "tandem-verifier"
    assert services["tandem.draft"] == "tandem-drafter"

    attributes: Any = request.attributes
    assert attributes["gen_ai.request.model"] == "target"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (36, TOKENS)
    steps = [dict(span.attributes or {}) for span in children["verify_step"]]
    assert sum(step["tandem.accepted"] for step in steps) == attributes["tandem.accepted_tokens"] > 0  # type: ignore[misc]
    assert sum(step["tandem.nodes"] for step in steps) == attributes["tandem.drafted_tokens"]  # type: ignore[misc]
    # The prompt's own step emits one.
    assert 1 + sum(step["tandem.tokens"] for step in steps) == TOKENS  # type: ignore[misc]
    for step in children["verify_step"]:
        assert (sequence.start_time or 0) < (step.start_time or 0) < (step.end_time or 0)
    values = [value for span in spans for value in (span.attributes or {}).values()]
    flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    assert {x for x in flat if isinstance(x, str)} <= WORDS
    assert all(isinstance(x, str | int | float) for x in flat)


async def test_sampling(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller decides for its trace, else the rate; of a traced request's steps and rounds a share is recorded."""
    async with stack(target, monkeypatch, sample_rate=1, verify_step_sample_rate=0) as running:
        await running.generate(UNSAMPLED)
        await running.generate()
    spans = running.spans
    assert sorted(span.name for span in spans) == [
        "tandem.prefill",
        "tandem.queue",
        "tandem.sequence",
        "text_completion target",
    ]
    assert TRACE not in {f"{span.context.trace_id:032x}" for span in spans if span.context}


async def test_an_error_is_told_by_its_class_alone(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text may be the request's."""
    async with stack(target, monkeypatch, sample_rate=1) as running:
        with pytest.raises(grpc.aio.AioRpcError, match="max_draft_nodes"):
            await running.generate(max_draft_nodes=10_000)
    (request,) = running.spans
    assert not request.status.is_ok
    assert (request.status.description, list(request.events)) == (None, [])
    assert (request.attributes or {})["error.type"] == "InvalidRequest"


def test_off_loads_nothing() -> None:
    """No service imports OpenTelemetry unless the config has `tracing:`."""
    code = (
        "import sys, gateway.app, verifier_service.app, drafter_service.app\n"
        "from tandem.spans import start_tracing\n"
        "assert start_tracing(None, 'gateway') is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_asked_for_but_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tandem.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(StartupError, match=r"^tracing: needs OpenTelemetry .*pip install 'tandem\[tracing\]'"):
        start_tracing(TracingConfig(endpoint="http://127.0.0.1:4317"), "gateway")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://127.0.0.1"])
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        TracingConfig(endpoint=endpoint)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps the names of spans."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.names += [s.name for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_arrive_at_a_collector() -> None:
    """All of them, once a service has ended in order."""
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tracing = start_tracing(TracingConfig(endpoint=f"http://127.0.0.1:{port}", sample_rate=1), "gateway")
    assert tracing
    with tracing.request((), "chat model", {}):
        pass
    await tracing.close()
    await server.stop(None)
    assert collector.names == ["chat model"]


async def test_a_service_ends_without_its_collector() -> None:
    """Spans that nobody takes are lost, and nothing else."""
    tracing = start_tracing(TracingConfig(endpoint=f"http://127.0.0.1:{free_port()}", sample_rate=1), "gateway")
    assert tracing
    with tracing.request((), "chat model", {}):
        pass
    async with asyncio.timeout(5):
        await tracing.close()
