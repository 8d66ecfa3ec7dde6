"""The verifier's Prometheus metrics. Ratios are for PromQL:

acceptance rate    rate(tandem_spec_decode_num_accepted_tokens_total) / rate(tandem_spec_decode_num_draft_tokens_total)
acceptance length  1 + rate(tandem_spec_decode_num_accepted_tokens_total) / rate(tandem_spec_decode_num_drafts_total)

How well the speculation controller predicts (docs/speculation.md):

step time          rate(tandem_spec_predicted_step_seconds_total) / rate(tandem_spec_measured_step_seconds_total)
tokens             rate(tandem_spec_expected_tokens_total) / rate(tandem_spec_emitted_tokens_total)
draft model        rate(tandem_spec_decode_num_accepted_tokens_per_pos_total)
                     / rate(tandem_spec_drafted_mass_per_pos_total)

What steps of a kind cost a mixture of experts (docs/targets.md); bytes are of expert weights, on all ranks:

bytes per emitted token    rate(tandem_expert_bytes_read_total) / rate(tandem_step_tokens_total), by (kind)
bytes per step             rate(tandem_expert_bytes_read_total) / rate(tandem_steps_total), by (kind)
what k more rows read      verify's bytes per step less decode's; k = the same of tandem_step_rows_total
busiest rank / mean        rate(tandem_expert_busiest_bytes_read_total) * ranks / rate(tandem_expert_bytes_read_total)
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.metrics import LATENCY_BUCKETS, STEP_BUCKETS
from tandem.speculation import SpeculationMode
from verifier_service.expert_load import StepExperts
from verifier_service.load import Load
from verifier_service.parallel.links import RankLost
from verifier_service.sequence import FinishReason
from verifier_service.speculation.controller import Reason

STEP_KINDS = ("prefill", "decode", "verify")
"""Steps with prompt tokens, plain ones, those with drafts."""


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
        self.step_tokens = counter("tandem_step_tokens", "Tokens emitted by steps", "kind")
        self.preemptions = counter("tandem_preemptions", "Sequences that lost their KV blocks and start over")
        self.feature_bytes = counter("tandem_feature_bytes_sent", "Bytes of features sent to drafters")
        self.queue_seconds = histogram(
            "tandem_request_queue_time_seconds",
            "From a request's coming to its first step",
            buckets=LATENCY_BUCKETS,
        )
        self.step_seconds = histogram("tandem_step_duration_seconds", "One step: forward to emission", "kind")
        self.verify_seconds = histogram("tandem_verify_duration_seconds", "The target's forward of one step", "kind")
        self.round_trip_seconds = histogram(
            "tandem_draft_round_trip_seconds", "From asking a drafter to having its draft"
        )
        self.draft_seconds = histogram("tandem_draft_compute_seconds", "The drafter's own time per round")
        self.sequences_per_step = histogram(
            "tandem_sequences_per_step", "Sequences that share a step", buckets=(1, 2, 4, 8, 16, 32, 64, 128)
        )
        self.choices = counter(
            "tandem_spec_choices", "Steps with sequences in auto mode, by what the controller chose", "mode", "reason"
        )
        self.chosen_nodes = histogram(
            "tandem_spec_chosen_nodes",
            "Nodes verified of a sequence in auto mode, in steps with drafts",
            buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256),
        )
        self.predicted_seconds = counter("tandem_spec_predicted_step_seconds", "Steps without prompts, predicted")
        self.measured_seconds = counter("tandem_spec_measured_step_seconds", "The same steps, measured")
        self.expected_tokens = counter("tandem_spec_expected_tokens", "Tokens of the same steps, expected")
        self.emitted_tokens = counter("tandem_spec_emitted_tokens", "Tokens of the same steps, chosen by the target")
        self.drafted_mass = counter(
            "tandem_spec_drafted_mass_per_pos",
            "Acceptances that the draft model's own probabilities promise for what was verified, by depth - 1",
            "position",
        )
        # No label for the expert: experts of one number in different layers have nothing in common, and labels for
        # both make 23,000 series of Kimi K2. Those counts are in the file of verifier.parallel.expert_loads.
        self.expert_tokens = counter(
            "tandem_expert_tokens", "Tokens sent to a rank's experts, once per layer and chosen expert", "rank"
        )
        self.experts_touched = histogram(
            "tandem_experts_touched",
            "Distinct experts that a layer reads in one step, mean over layers",
            "kind",
            buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384),
        )
        self.expert_imbalance = histogram(
            "tandem_expert_imbalance",
            "Tokens of the rank with most in each layer over the ranks' mean, one step",
            "kind",
            buckets=(1, 1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8),
        )
        self.expert_bytes = counter("tandem_expert_bytes_read", "Expert weights that steps read, on all ranks", "kind")
        self.expert_busiest_bytes = counter(
            "tandem_expert_busiest_bytes_read", "The same on the rank that reads most of each layer", "kind"
        )
        self.bytes_read = counter(
            "tandem_target_bytes_read",
            "Bytes that steps read on all ranks, computed from sizes and not measured: weights, all but routed "
            "experts, once a step; KV, each sequence's prefix once a step",
            "kind",
            "what",
        )
        self.replays = counter("tandem_graph_replays", "Steps replayed, by rows of the bucket", "rows")
        self.replay_seconds = counter(
            "tandem_graph_replay_seconds", "What those took, until the results were there", "rows"
        )
        self.graph_fallbacks = counter(
            "tandem_graph_fallbacks",
            "Steps that ran eagerly though steps are captured, by why",
            "reason",
        )
        self.ranks = Gauge("tandem_ranks", "Processes that run the target together", registry=registry)
        self.rank_failures = counter("tandem_rank_failures", "Ranks that died; the verifier ends with them", "rank")
        self._make_children()

    def _make_children(self) -> None:
        """A rate needs a value before the first event of its kind."""
        for kind in STEP_KINDS:
            for metric in (
                self.steps,
                self.step_rows,
                self.step_tokens,
                self.step_seconds,
                self.verify_seconds,
                self.experts_touched,
                self.expert_imbalance,
                self.expert_bytes,
                self.expert_busiest_bytes,
            ):
                metric.labels(kind)
            for what in ("weights", "kv"):
                self.bytes_read.labels(kind, what)
        for reason in ("stale", "late"):
            self.discarded_drafts.labels(reason)
        for reason in ("capture", "memory", "replay", "no_bucket"):
            self.graph_fallbacks.labels(reason)
        for source in ("computed", "cached"):
            self.prompt_tokens.labels(source)
        for finish in FinishReason:
            self.requests.labels(finish.value)
        for mode in (SpeculationMode.OFF, SpeculationMode.TREE):
            for choice in Reason:
                self.choices.labels(mode.value, choice.value)

    def set_ranks(self, count: int) -> None:
        """Processes that run the target together."""
        self.ranks.set(count)
        for rank in range(count):
            self.rank_failures.labels(rank)
            self.expert_tokens.labels(rank)

    def expect_positions(self, count: int) -> None:
        """Drafts are as deep as this."""
        for position in range(count):
            self.accepted_per_position.labels(position)
            self.drafted_mass.labels(position)

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
        gauge(
            "tandem_spec_gain", "Tokens per second by speculating over plain, predicted", lambda x: x.speculation.gain
        )
        gauge("tandem_spec_asked_nodes", "Nodes asked for per sequence", lambda x: x.speculation.nodes)
        buckets = Gauge("tandem_graph_buckets", "Capacities that steps run in", ["captured"], registry=self._registry)
        for captured in (True, False):
            count = partial(_count_buckets, load, captured)
            buckets.labels(str(captured).lower()).set_function(count)

    def count_reads(self, kind: str, weights: int, kv: int) -> None:
        """Bytes that a step read."""
        self.bytes_read.labels(kind, "weights").inc(weights)
        self.bytes_read.labels(kind, "kv").inc(kv)

    def count_graph(self, rows: int, replay_seconds: float | None, fallback: str | None) -> None:
        """A step of a bucket of so many rows; see StepResult."""
        if replay_seconds is not None:
            self.replays.labels(rows).inc()
            self.replay_seconds.labels(rows).inc(replay_seconds)
        if fallback:
            self.graph_fallbacks.labels(fallback).inc()

    def count_rank_failure(self, lost: RankLost) -> None:
        """Of several ranks one is gone."""
        self.ranks.dec()
        self.rank_failures.labels(lost.rank).inc()

    def count_experts(self, kind: str, step: StepExperts) -> None:
        """A step of a target with a mixture of experts."""
        for rank, tokens in enumerate(step.rank_tokens):
            self.expert_tokens.labels(rank).inc(float(tokens))
        self.experts_touched.labels(kind).observe(step.touched)
        self.expert_imbalance.labels(kind).observe(step.imbalance)
        self.expert_bytes.labels(kind).inc(step.read_bytes)
        self.expert_busiest_bytes.labels(kind).inc(step.busiest_bytes)

    def count_choice(self, mode: str, reason: str) -> None:
        """A step with sequences in auto mode."""
        self.choices.labels(mode, reason).inc()

    def count_prediction(self, predicted: float, measured: float, expected_tokens: float, tokens: int) -> None:
        """A step without prompts; seconds."""
        self.predicted_seconds.inc(predicted)
        self.measured_seconds.inc(measured)
        self.expected_tokens.inc(expected_tokens)
        self.emitted_tokens.inc(tokens)

    def count_mass(self, mass: np.ndarray) -> None:
        """Sums of path probabilities of verified nodes, by depth - 1."""
        for position, value in enumerate(mass):
            if value > 0:
                self.drafted_mass.labels(position).inc(float(value))

    def count_draft(self, drafted: int, accepted: int) -> None:
        """One sequence's draft was verified."""
        self.drafts.inc()
        self.draft_tokens.inc(drafted)
        self.accepted_tokens.inc(accepted)
        for depth in range(accepted):
            self.accepted_per_position.labels(depth).inc()


def _count_buckets(load: Callable[[], Load], captured: bool) -> float:
    return sum(bucket.captured is captured for bucket in load().buckets)
