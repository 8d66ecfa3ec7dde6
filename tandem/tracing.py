"""OpenTelemetry spans of requests. The only file that knows OpenTelemetry; it is loaded where `tracing:` is configured.

A request's spans, all of one trace; attributes have the names of the semantic conventions for generative AI where there
are any:

gateway     chat MODEL, or text_completion MODEL
verifier      tandem.sequence, one per submission
                tandem.queue, tandem.prefill, tandem.verify_step, tandem.draft_round
drafter           tandem.draft, below its round
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem import __version__
from tandem.spans import DecodeStep, outgoing_metadata

if TYPE_CHECKING:
    from tandem.config import TracingConfig

Attributes = Mapping[str, Any]

_PROPAGATOR = TraceContextTextMapPropagator()
_EXPORT_SECONDS = 2.0
"""For one batch, however often it is tried: a service that ends waits no longer for a collector that is away."""


class Tracing:
    """The spans of one service."""

    def __init__(self, config: "TracingConfig", service: str, exporter: SpanExporter | None = None):
        """Without an exporter spans go to the config's endpoint, by a thread of OpenTelemetry's. Those that nobody
        takes are dropped."""
        resource = Resource.create({"service.name": f"tandem-{service}", "service.version": __version__})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_rate)), resource=resource, shutdown_on_exit=False
        )
        if exporter is None:
            plain = config.endpoint.startswith("http://")
            exporter = OTLPSpanExporter(config.endpoint, insecure=plain, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tandem", __version__)
        self._step_rate = config.verify_step_sample_rate

    async def close(self) -> None:
        """Send what is left."""
        await asyncio.to_thread(self._provider.shutdown)

    @contextlib.contextmanager
    def request(self, metadata: Iterable[tuple[str, Any]] | None, name: str, attributes: Attributes) -> Iterator[Span]:
        """A client's request: its span, in the caller's trace if the metadata name one. Calls made inside go on with
        it by `outgoing_metadata`. An exception is told by its class alone: its text may be the request's."""
        span = self._tracer.start_span(name, _context_of(metadata), SpanKind.SERVER, attributes)
        token = outgoing_metadata.set(tuple(_carrier(span).items()))
        try:
            yield span
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            if isinstance(error, Exception):
                span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            outgoing_metadata.reset(token)
            span.end()

    def sequence(self, metadata: Iterable[tuple[str, Any]] | None) -> "SequenceTrace | None":
        """A sequence of the request that the metadata name; None if it is not traced."""
        span = self._tracer.start_span("tandem.sequence", _context_of(metadata), SpanKind.SERVER)
        return SequenceTrace(self._tracer, span, self._step_rate) if span.is_recording() else None

    def drafted(self, traceparent: str, started: float, ended: float, nodes: int, batch: int) -> None:
        """A draft of so many nodes was made, with others: `batch` in all. Times are of time.perf_counter()."""
        context = _context_of([("traceparent", traceparent)])
        attributes = {"tandem.nodes": nodes, "tandem.batch": batch}
        span = self._tracer.start_span(
            "tandem.draft", context, SpanKind.SERVER, attributes, start_time=_epoch_ns(started)
        )
        span.end(_epoch_ns(ended))


class SequenceTrace:
    """The spans of one sequence; see tandem.spans.SequenceSpans. Made and ended by the servicer, told by the engine."""

    def __init__(self, tracer: Tracer, span: Span, step_rate: float):
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())
        self._step_rate = step_rate
        self._started = time.perf_counter()
        self._draft: DraftTrace | None = None
        """The last asked for."""

    def end(self, outcome: str, tokens: int) -> None:
        if self._draft:
            self._draft.end("lost")
        self._span.set_attributes({"tandem.outcome": outcome, "gen_ai.usage.output_tokens": tokens})
        self._span.end()

    def queued(self, came: float, started: float) -> None:
        self._started = started
        self._record("tandem.queue", came, started, {})

    def prefilled(self, ended: float, prompt_tokens: int, cached_tokens: int) -> None:
        attributes = {
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached_tokens,
        }
        self._record("tandem.prefill", self._started, ended, attributes)

    def asked(self) -> "DraftTrace | None":
        if self._draft:
            self._draft.end("lost")
        record = self._draw()
        span = self._tracer.start_span("tandem.draft_round", self._context, SpanKind.CLIENT) if record else None
        self._draft = DraftTrace(span) if span else None
        return self._draft

    def stepped(self, step: DecodeStep) -> None:
        if not (step.draft_recorded if step.asked else self._draw()):
            return
        attributes = {
            "tandem.mode": step.mode,
            "tandem.sequences": step.sequences,
            "tandem.rows": step.rows,
            "tandem.bucket": step.bucket,
            "tandem.nodes": step.nodes,
            "tandem.accepted": step.accepted,
            "tandem.tokens": step.tokens,
        }
        self._record("tandem.verify_step", step.started, step.ended, attributes)

    def _draw(self) -> bool:
        return random.random() < self._step_rate

    def _record(self, name: str, started: float, ended: float, attributes: Attributes) -> None:
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=_epoch_ns(started))
        span.end(_epoch_ns(ended))


class DraftTrace:
    """See tandem.spans.DraftSpan."""

    def __init__(self, span: Span):
        self._span = span
        self.traceparent = _carrier(span)["traceparent"]

    def end(self, outcome: str, nodes: int = 0, compute_us: int = 0) -> None:
        # Only the first counts: a drafter may answer twice, and what came is not lost.
        if self._span.is_recording():
            self._span.set_attribute("tandem.outcome", outcome)
            self._span.set_attributes({"tandem.nodes": nodes, "tandem.compute_us": compute_us})
            self._span.end()


def _context_of(metadata: Iterable[tuple[str, Any]] | None) -> Context:
    """The caller's trace; a new one if there is none, or none that can be read."""
    return _PROPAGATOR.extract(dict(metadata or ()), Context())


def _carrier(span: Span) -> dict[str, str]:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier


def _epoch_ns(moment: float) -> int:
    """Nanoseconds since 1970 of a time.perf_counter()."""
    return time.time_ns() - round((time.perf_counter() - moment) * 1e9)
