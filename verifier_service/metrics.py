"""The verifier's Prometheus metrics. Ratios are for PromQL:

acceptance rate    rate(tandem_spec_decode_num_accepted_tokens_total) / rate(tandem_spec_decode_num_draft_tokens_total)
acceptance length  1 + rate(tandem_spec_decode_num_accepted_tokens_total) / rate(tandem_spec_decode_num_drafts_total)
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.metrics import STEP_BUCKETS
from verifier_service.load import Load


class VerifierMetrics:
    """Written by the engine's thread and the speculation servicer."""

    def __init__(self, registry: CollectorRegistry):
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = STEP_BUCKETS) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._registry = registry
        self.drafts = counter("tandem_spec_decode_num_drafts", "Sequence-steps that verified a draft")
        self.draft_tokens = counter("tandem_spec_decode_num_draft_tokens", "Draft tokens verified")
        self.accepted_tokens = counter("tandem_spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.accepted_per_position = counter(
            "tandem_spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by depth - 1", "position"
        )
        self.discarded_drafts = counter("tandem_discarded_drafts", "Drafts dropped unverified", "reason")
        self.generation_tokens = counter("tandem_generation_tokens", "Tokens emitted")
        self.prompt_tokens = counter("tandem_prompt_tokens", "Prompt tokens of admitted requests", "source")
        self.requests = counter("tandem_requests", "Sequences ended", "finish_reason")
        self.steps = counter("tandem_steps", "Steps of the target", "kind")
        self.step_rows = counter("tandem_step_rows", "Rows computed by steps, padding included", "kind")
        self.preemptions = counter("tandem_preemptions", "Sequences that lost their KV blocks and start over")
        self.feature_bytes = counter("tandem_feature_bytes_sent", "Bytes of features sent to drafters")
        self.step_seconds = histogram("tandem_step_duration_seconds", "One step: forward to emission", "kind")
        self.verify_seconds = histogram("tandem_verify_duration_seconds", "The target's forward of one step", "kind")
        self.round_trip_seconds = histogram(
            "tandem_draft_round_trip_seconds", "From asking a drafter to having its draft"
        )
        self.draft_seconds = histogram("tandem_draft_compute_seconds", "The drafter's own time per round")
        self.sequences_per_step = histogram(
            "tandem_sequences_per_step", "Sequences that share a step", buckets=(1, 2, 4, 8, 16, 32, 64, 128)
        )
        for kind in ("prefill", "decode", "verify"):
            self.steps.labels(kind)
        for reason in ("stale", "late"):
            self.discarded_drafts.labels(reason)
        for source in ("computed", "cached"):
            self.prompt_tokens.labels(source)

    def observe_load(self, load: Callable[[], Load]) -> None:
        """Serve the load's figures as gauges, read at scrape time."""

        def gauge(name: str, text: str, read: Callable[[Load], float]) -> None:
            Gauge(name, text, registry=self._registry).set_function(lambda: read(load()))

        gauge("tandem_num_requests_running", "Sequences that step", lambda x: x.running)
        gauge("tandem_num_requests_waiting", "Sequences not yet admitted", lambda x: x.waiting)
        gauge("tandem_kv_blocks_used", "KV blocks held by live sequences", lambda x: x.kv_used)
        gauge("tandem_kv_blocks_cached", "KV blocks kept for prefix reuse only", lambda x: x.kv_cached)
        gauge("tandem_kv_blocks", "KV blocks in all", lambda x: x.kv_total)
        gauge("tandem_drafters", "Drafters connected", lambda x: x.drafters)

    def count_draft(self, drafted: int, accepted: int) -> None:
        """One sequence's draft was verified."""
        self.drafts.inc()
        self.draft_tokens.inc(drafted)
        self.accepted_tokens.inc(accepted)
        for depth in range(accepted):
            self.accepted_per_position.labels(depth).inc()
