"""The drafter's Prometheus metrics. Ratios are for PromQL, e.g. the mean time of a forward
rate(tandem_drafter_forward_seconds_sum[1m]) / rate(tandem_drafter_forward_seconds_count[1m])
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.metrics import STEP_BUCKETS

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class DrafterMetrics:
    """Written by the event loop's thread only."""

    def __init__(self, registry: CollectorRegistry):
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tandem_drafter_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tandem_drafter_{name}", text, buckets=buckets, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tandem_drafter_{name}", text, labels, registry=registry)

        self.rounds = counter("rounds", "Rounds received")
        self.drafts = counter("drafts", "Drafts sent")
        self.empty_drafts = counter("empty_drafts", "Of those, drafts without tokens: there was nothing to propose")
        self.draft_tokens = counter("draft_tokens", "Tokens of the drafts sent")
        self.context_positions = counter("context_positions", "Positions whose features or tokens were stored")
        self.context_gaps = counter("context_gaps", "Times missing features or tokens were asked for")
        self.contexts_dropped = counter("contexts_dropped", "Contexts given up because drafter.kv_blocks had no room")
        self.stale_requests = counter("stale_requests", "Requests not drafted: their sequence has moved on")
        self.reconnects = counter("reconnects", "Attempts to reach the verifier after the first")
        self.registrations_refused = counter("registrations_refused", "Times the verifier refused this drafter")
        self.context_seconds = histogram("context_seconds", "Computing the context of one batch", STEP_BUCKETS)
        self.forward_seconds = histogram(
            "forward_seconds", "One batch: its forward, or its n-gram lookups", STEP_BUCKETS
        )
        self.batch_size = histogram("batch_size", "Sequences drafted in one batch", _BATCH_BUCKETS)
        self.sequences = gauge("sequences", "Sequences whose context is held")
        self.kv_blocks_used = gauge("kv_blocks_used", "Blocks of drafter.kv_blocks that hold a context")
        self.graph_buckets = gauge("graph_buckets", "Steps of fixed shape, by whether they are captured", "captured")
        self.graph_replays = counter("graph_replays", "Forwards replayed, by requests of the step", "requests")
        self.graph_fallbacks = counter(
            "graph_fallbacks", "Forwards that ran without their graph, by why there is none", "reason"
        )
        self.registered = gauge("registered", "1 while registered with the verifier")
        # A rate needs a value before the first event of its kind.
        for captured in ("true", "false"):
            self.graph_buckets.labels(captured)
        for reason in ("capture", "memory", "replay"):
            self.graph_fallbacks.labels(reason)
