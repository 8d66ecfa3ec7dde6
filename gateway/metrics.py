"""The gateway's Prometheus metrics. How drafting does is in the verifier's."""

from collections.abc import Callable

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.metrics import LATENCY_BUCKETS, STEP_BUCKETS

_METHODS = ("Generate", "OpenSession", "CloseSession", "GetSession", "Tokenize", "GetModel")
_CODES = (
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
)
"""All that calls end with."""


class GatewayMetrics:
    """Written by the event loop."""

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry
        self.requests = Counter(
            "tandem_gateway_requests", "Calls ended, by gRPC status", ["method", "code"], registry=registry
        )
        self.prompt_tokens = Counter("tandem_gateway_prompt_tokens", "Tokens of prompts", registry=registry)
        self.generation_tokens = Counter("tandem_gateway_generation_tokens", "Tokens streamed", registry=registry)
        self.resubmissions = Counter(
            "tandem_gateway_resubmissions",
            "Times a generation lost its verifier and was submitted again, however many attempts it took",
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "tandem_time_to_first_token_seconds",
            "From the request to its first token",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "tandem_inter_token_latency_seconds",
            "Between tokens; the tokens of one step share its time",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.request_latency = Histogram(
            "tandem_e2e_request_latency_seconds",
            "From the request to its end, of generations that ended normally",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        # A rate needs a value before the first call of its kind.
        for method in _METHODS:
            for code in _CODES:
                self.requests.labels(method, code.name)

    def observe(
        self, in_flight: Callable[[], float], sessions: Callable[[], float], verifier_ready: Callable[[], float]
    ) -> None:
        """Serve these as gauges, read at scrape time."""

        def gauge(name: str, text: str, read: Callable[[], float]) -> None:
            Gauge(f"tandem_gateway_{name}", text, registry=self._registry).set_function(read)

        gauge("requests_in_flight", "Generations now", in_flight)
        gauge("sessions", "Sessions kept", sessions)
        gauge("verifier_ready", "1 while the verifier serves", verifier_ready)
