"""Inside the verifier: steps, graphs, memory traffic, experts and ranks."""

from tools.dashboards.panels import Dashboard, Panel, Query, Row, quantiles, ratio

_STEPS = "rate(tandem_steps_total{$s}$i)"
_FORWARD = "rate(tandem_verify_duration_seconds_sum{$s}$i)"
_STEP = "rate(tandem_step_duration_seconds_sum{$s}$i)"
_TOKENS = 'rate(tandem_step_tokens_total{$s, kind!="prefill"}$i)'

VERIFIER = Dashboard(
    uid="tandem-verifier",
    title="Tandem: verifier internals",
    description="Steps of the target, captured graphs, what they read from memory, experts and ranks.",
    rows=(
        Row(
            "Steps",
            (
                Panel(
                    "Steps by kind",
                    "Per second: with prompt tokens (prefill), plain (decode), with drafts (verify).",
                    (Query(f"sum by (kind) ({_STEPS})", "{{kind}}"),),
                    stacked=True,
                ),
                Panel(
                    "Time of a step",
                    "From its start to handing its tokens out, 95th percentile.",
                    quantiles("tandem_step_duration_seconds", "kind", 0.95),
                    unit="s",
                ),
                Panel(
                    "Time of the forward",
                    "The target alone, median.",
                    quantiles("tandem_verify_duration_seconds", "kind", 0.5),
                    unit="s",
                ),
                Panel(
                    "Host's share of a step",
                    "Sampling, walk, compaction and bookkeeping: what is not the forward. On a GPU, large values mean "
                    "that the device waits for Python.",
                    (
                        Query(
                            f"1 - sum by (kind) ({_FORWARD}) / (sum by (kind) ({_STEP}) > 0)",
                            "{{kind}}",
                        ),
                    ),
                    unit="percentunit",
                    low=0,
                    high=1,
                ),
                Panel(
                    "Rows per step",
                    "Computed, padding included.",
                    (Query(ratio("rate(tandem_step_rows_total{$s}$i)", _STEPS, "kind"), "{{kind}}"),),
                ),
                Panel(
                    "Sequences per step",
                    "That share a step.",
                    quantiles("tandem_sequences_per_step", "", 0.5, 0.95),
                ),
                Panel(
                    "Time spent in steps",
                    "Share of the time, by kind; what is missing to 100 % the verifier waited, for requests or drafts.",
                    (Query(f"sum by (kind) ({_STEP})", "{{kind}}"),),
                    unit="percentunit",
                    stacked=True,
                    low=0,
                ),
                Panel(
                    "Sequences",
                    "That step, and not yet admitted.",
                    (
                        Query("sum(tandem_num_requests_running{$s})", "running"),
                        Query("sum(tandem_num_requests_waiting{$s})", "waiting"),
                    ),
                ),
                Panel(
                    "KV blocks",
                    "Held by live sequences, kept for prefix reuse only, and in all.",
                    (
                        Query("sum(tandem_kv_blocks_used{$s})", "used"),
                        Query("sum(tandem_kv_blocks_cached{$s})", "kept for reuse"),
                        Query("sum(tandem_kv_blocks{$s})", "in all"),
                    ),
                ),
            ),
        ),
        Row(
            "What does it take for graphs to work?",
            (
                Panel(
                    "Buckets",
                    "Captured, and those that run eagerly. `tandem status` says why.",
                    (Query("sum by (captured) (tandem_graph_buckets{$s})", "captured: {{captured}}"),),
                    width=6,
                ),
                Panel(
                    "Replays by rows",
                    "Steps per second that replayed a bucket of so many rows.",
                    (Query("sum by (rows) (rate(tandem_graph_replays_total{$s}$i))", "{{rows}}"),),
                    stacked=True,
                    width=6,
                ),
                Panel(
                    "Time of a replay by rows",
                    "Mean, until its results are there.",
                    (
                        Query(
                            ratio(
                                "rate(tandem_graph_replay_seconds_total{$s}$i)",
                                "rate(tandem_graph_replays_total{$s}$i)",
                                "rows",
                            ),
                            "{{rows}}",
                        ),
                    ),
                    unit="s",
                    width=6,
                ),
                Panel(
                    "Fallbacks",
                    "Steps per second that ran eagerly though steps are captured, by reason. no_bucket: prompts larger "
                    "than any bucket, which is no fault. Without graphs there are none.",
                    (Query("sum by (reason) (rate(tandem_graph_fallbacks_total{$s}$i))", "{{reason}}"),),
                    stacked=True,
                    width=6,
                ),
            ),
        ),
        Row(
            "What steps read from memory (computed from sizes)",
            (
                Panel(
                    "Bandwidth",
                    "Bytes per second that steps read on all ranks. Against the memory's own: how far from its bound "
                    "the target is.",
                    (
                        Query("sum by (what) (rate(tandem_target_bytes_read_total{$s}$i))", "{{what}}"),
                        Query("sum(rate(tandem_expert_bytes_read_total{$s}$i))", "experts"),
                    ),
                    unit="Bps",
                    stacked=True,
                ),
                Panel(
                    "Bandwidth during the forward",
                    "The same per second that the target computes, by kind of step.",
                    (
                        Query(
                            "(sum by (kind) (rate(tandem_target_bytes_read_total{$s}$i)) + "
                            "sum by (kind) (rate(tandem_expert_bytes_read_total{$s}$i))) "
                            f"/ (sum by (kind) ({_FORWARD}) > 0)",
                            "{{kind}}",
                        ),
                    ),
                    unit="Bps",
                ),
                Panel(
                    "Bytes per emitted token, by what is read",
                    "Over all steps without prompts. Speculation and batching both bring the weights' part down.",
                    (
                        Query(
                            'sum by (what) (rate(tandem_target_bytes_read_total{$s, kind!="prefill"}$i)) '
                            f"/ on () group_left () (sum({_TOKENS}) > 0)",
                            "{{what}}",
                        ),
                        Query(ratio('rate(tandem_expert_bytes_read_total{$s, kind!="prefill"}$i)', _TOKENS), "experts"),
                    ),
                    unit="bytes",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Experts and ranks",
            (
                Panel(
                    "Imbalance",
                    "Tokens of each layer's busiest rank over the ranks' mean: what layers wait for over what they "
                    "could. From 2 on: `tandem experts plan`.",
                    quantiles("tandem_expert_imbalance", "kind", 0.5, 0.95),
                    thresholds=((None, "transparent"), (2, "red")),
                    low=1,
                ),
                Panel(
                    "Experts touched",
                    "Distinct experts that a layer reads in a step, mean over layers, median over steps.",
                    quantiles("tandem_experts_touched", "kind", 0.5),
                ),
                Panel(
                    "Expert bytes per step",
                    "Expert weights that a step reads on all ranks; verify less decode is what draft rows woke.",
                    (Query(ratio("rate(tandem_expert_bytes_read_total{$s}$i)", _STEPS, "kind"), "{{kind}}"),),
                    unit="bytes",
                ),
                Panel(
                    "Busiest rank over mean, by bytes",
                    "Expert weights read by each layer's busiest rank over the ranks' mean.",
                    (
                        Query(
                            "sum by (kind) (rate(tandem_expert_busiest_bytes_read_total{$s}$i)) "
                            "* on () group_left () max(tandem_ranks{$s}) "
                            "/ (sum by (kind) (rate(tandem_expert_bytes_read_total{$s}$i)) > 0)",
                            "{{kind}}",
                        ),
                    ),
                    low=1,
                ),
                Panel(
                    "Tokens by rank",
                    "Sent to each rank's experts, per second.",
                    (Query("sum by (rank) (rate(tandem_expert_tokens_total{$s}$i))", "rank {{rank}}"),),
                    stacked=True,
                ),
                Panel(
                    "Ranks",
                    "Processes that run the target together, and losses of one. A loss ends the verifier.",
                    (
                        Query("sum(tandem_ranks{$s})", "ranks"),
                        Query("sum by (rank) (increase(tandem_rank_failures_total{$s}$i))", "lost {{rank}}"),
                    ),
                ),
            ),
        ),
    ),
)
