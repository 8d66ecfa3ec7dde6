"""What the services' Prometheus metrics share: buckets, what every registry has, and the HTTP server."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server

from tandem import __version__
from tandem.errors import StartupError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

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
"""Seconds: first token, whole requests, waiting in a queue."""


def new_registry(service: str) -> CollectorRegistry:
    """With the process_* metrics and tandem_build_info, which all services have."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    text = "1, with the service and its version as labels"
    Gauge("tandem_build_info", text, ["service", "version"], registry=registry).labels(service, __version__).set(1)
    return registry


def serve_metrics(
    listen: str | None, key: str, registry: CollectorRegistry, pages: "Mapping[str, WSGIApplication] | None" = None
) -> None:
    """Serve /metrics on its own thread; StartupError naming the config key if the port is taken. pages: what else is
    there, by the first part of the path."""
    if listen is None:
        return
    host, _, port = listen.rpartition(":")
    try:
        server, _ = start_http_server(int(port), addr=host, registry=registry)
    except OSError as error:
        raise StartupError(f"{key}: cannot listen on {listen}: {error.strerror}") from None
    if pages:
        metrics = server.get_app()
        assert metrics

        def serve(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
            page = environ["PATH_INFO"].lstrip("/").partition("/")[0]
            return pages.get(page, metrics)(environ, start_response)

        server.set_app(serve)
