"""What the services' Prometheus metrics share: buckets and the HTTP server."""

from prometheus_client import CollectorRegistry, start_http_server

from tandem.errors import StartupError

STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064, 0.128, 0.5, 2.0)
"""Seconds: one verify step, one draft, one transfer."""

LATENCY_BUCKETS = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
"""Seconds: first token, whole requests."""


def serve_metrics(listen: str | None, key: str, registry: CollectorRegistry) -> None:
    """Serve /metrics on its own thread; StartupError naming the config key if the port is taken."""
    if listen is None:
        return
    host, _, port = listen.rpartition(":")
    try:
        start_http_server(int(port), addr=host, registry=registry)
    except OSError as error:
        raise StartupError(f"{key}: cannot listen on {listen}: {error.strerror}") from None
