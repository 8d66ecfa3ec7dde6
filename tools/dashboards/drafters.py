"""Rows of the speculation dashboard: how drafters do, and how well the controller predicts."""

from tools.dashboards.panels import Panel, Query, Row, quantiles, ratio

DRAFTERS = Row(
    "Drafters",
    (
        Panel(
            "Round trip",
            "From asking a drafter to having its draft, and the drafter's own time in it. The rest is transfer "
            "and its queue.",
            (
                *quantiles("tandem_draft_round_trip_seconds", "", 0.5, 0.95),
                Query(
                    ratio(
                        "rate(tandem_draft_compute_seconds_sum{$s}$i)",
                        "rate(tandem_draft_compute_seconds_count{$s}$i)",
                    ),
                    "drafter's own, mean",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Drafts not used",
            "Per second. Late: the step went on without; stale: the sequence had moved on; empty: the drafter "
            "had nothing to propose.",
            (
                Query("sum by (reason) (rate(tandem_discarded_drafts_total{$s}$i))", "{{reason}}"),
                Query("sum(rate(tandem_drafter_empty_drafts_total{$s}$i))", "empty"),
            ),
        ),
        Panel(
            "Features sent",
            "To drafters, per second.",
            (Query("sum(rate(tandem_feature_bytes_sent_total{$s}$i))", "features"),),
            unit="Bps",
        ),
        Panel(
            "Time in the drafter",
            "Of one batch: computing its context, and its forward.",
            (
                Query(
                    ratio(
                        "rate(tandem_drafter_context_seconds_sum{$s}$i)",
                        "rate(tandem_drafter_context_seconds_count{$s}$i)",
                    ),
                    "context",
                ),
                Query(
                    ratio(
                        "rate(tandem_drafter_forward_seconds_sum{$s}$i)",
                        "rate(tandem_drafter_forward_seconds_count{$s}$i)",
                    ),
                    "forward",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Drafter busy",
            "Share of the time that each drafter computes. What components/autoscaling scales by, at 0.6.",
            (
                Query(
                    "sum by (instance) (rate(tandem_drafter_forward_seconds_sum{$s}$i)) "
                    "+ sum by (instance) (rate(tandem_drafter_context_seconds_sum{$s}$i))",
                    "{{instance}}",
                ),
            ),
            unit="percentunit",
            low=0,
            thresholds=((None, "transparent"), (0.6, "orange")),
        ),
        Panel(
            "Drafts by drafter",
            "Per second, and tokens per draft.",
            (
                Query("sum by (instance) (rate(tandem_drafter_drafts_total{$s}$i))", "drafts/s {{instance}}"),
                Query(
                    ratio(
                        "rate(tandem_drafter_draft_tokens_total{$s}$i)",
                        "rate(tandem_drafter_drafts_total{$s}$i)",
                    ),
                    "tokens per draft",
                ),
            ),
        ),
        Panel(
            "Sequences per draft batch",
            "Drafted in one forward, mean.",
            (
                Query(
                    ratio(
                        "rate(tandem_drafter_batch_size_sum{$s}$i)",
                        "rate(tandem_drafter_batch_size_count{$s}$i)",
                    ),
                    "sequences",
                ),
            ),
            width=6,
        ),
        Panel(
            "Context",
            "Positions stored per second, and times that missing ones were asked for or held ones given up.",
            (
                Query("sum(rate(tandem_drafter_context_positions_total{$s}$i))", "positions/s"),
                Query("sum(rate(tandem_drafter_context_gaps_total{$s}$i))", "gaps/s"),
                Query("sum(rate(tandem_drafter_contexts_dropped_total{$s}$i))", "given up/s"),
            ),
            width=6,
        ),
        Panel(
            "Graphs of the drafters",
            "Forwards per second that replayed a captured graph, and that had none though graphs are on, by reason.",
            (
                Query("sum(rate(tandem_drafter_graph_replays_total{$s}$i))", "replayed"),
                Query("sum by (reason) (rate(tandem_drafter_graph_fallbacks_total{$s}$i))", "{{reason}}"),
            ),
            width=6,
        ),
        Panel(
            "Links to the verifier",
            "Registered drafters, refusals and attempts to reconnect.",
            (
                Query("sum(tandem_drafter_registered{$s})", "registered"),
                Query("sum(increase(tandem_drafter_registrations_refused_total{$s}$i))", "refused"),
                Query("sum(increase(tandem_drafter_reconnects_total{$s}$i))", "reconnects"),
            ),
            width=6,
        ),
    ),
)

CONTROLLER = Row(
    "Is the controller right?",
    (
        Panel(
            "Predicted over measured",
            "Step times, and tokens: near 1, or the controller decides on wrong figures.",
            (
                Query(
                    ratio(
                        "rate(tandem_spec_predicted_step_seconds_total{$s}$i)",
                        "rate(tandem_spec_measured_step_seconds_total{$s}$i)",
                    ),
                    "step time",
                ),
                Query(
                    ratio(
                        "rate(tandem_spec_expected_tokens_total{$s}$i)",
                        "rate(tandem_spec_emitted_tokens_total{$s}$i)",
                    ),
                    "tokens",
                ),
            ),
            width=12,
        ),
        Panel(
            "Looking at the other side",
            "Share of steps that probe: drafts while they are off, plain steps while they are on. Meant to cost "
            "about 1 %.",
            (
                Query(
                    ratio(
                        'rate(tandem_spec_choices_total{$s, reason=~"probing.*"}$i)',
                        "rate(tandem_spec_choices_total{$s}$i)",
                    ),
                    "probing",
                ),
            ),
            unit="percentunit",
            width=12,
        ),
    ),
)
