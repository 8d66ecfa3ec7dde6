"""Exporters of the real metrics classes, for what one CPU's demo stack cannot have: experts, ranks, captured graphs."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from prometheus_client import start_http_server

from drafter_service.metrics import DrafterMetrics
from tandem.metrics import new_registry
from verifier_service.expert_load import ExpertLoad
from verifier_service.metrics import VerifierMetrics

RANKS = 4


class Elsewhere:
    """A verifier of a mixture of experts over several ranks with captured graphs, and its drafter. Nothing runs."""

    def __init__(self) -> None:
        registry = new_registry("verifier")
        self._verifier = VerifierMetrics(registry)
        self._verifier.set_ranks(RANKS)
        self._drafter = DrafterMetrics(registry)
        self._experts = ExpertLoad(layers=[1, 2], experts=16, expert_bytes=[1000, 1000], ranks=RANKS)
        self._random = np.random.default_rng(1)
        self.registry = registry

    def step(self) -> None:
        """One step of each kind, on replayed graphs."""
        for kind, rows in (("prefill", 32), ("decode", 1), ("verify", 8)):
            self._verifier.steps.labels(kind).inc()
            self._verifier.step_rows.labels(kind).inc(rows)
            self._verifier.step_tokens.labels(kind).inc(2)
            self._verifier.count_reads(kind, 10_000, 100)
            self._verifier.count_experts(kind, self._experts.count(self._random.integers(16, size=(2, rows, 2))))
            self._verifier.count_graph(rows, 0.01, None)
        self._drafter.graph_replays.labels(4).inc()


@contextmanager
def exported(port: int) -> Iterator[Elsewhere]:
    """Serves its metrics."""
    elsewhere = Elsewhere()
    server, thread = start_http_server(port, addr="127.0.0.1", registry=elsewhere.registry)
    try:
        yield elsewhere
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
