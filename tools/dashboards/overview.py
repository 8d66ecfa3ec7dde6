"""For whoever is on call: is it up, fast and large enough?"""

from tools.dashboards.panels import Dashboard, Panel, Query, Row, quantiles, ratio

_ERRORS = 'rate(tandem_gateway_requests_total{$s, method="Generate", code=~"INTERNAL|UNAVAILABLE"}$i)'
_GENERATIONS = 'rate(tandem_gateway_requests_total{$s, method="Generate"}$i)'
_JOBS = 'job=~"(.+/)?(gateway|verifier|drafter)"'

OVERVIEW = Dashboard(
    uid="tandem-overview",
    title="Tandem: service overview",
    description="Traffic, latency, capacity and health of gateway, verifier and drafters.",
    rows=(
        Row(
            "Now",
            (
                Panel(
                    "Verifier",
                    "Whether the gateways reach a verifier that serves.",
                    (Query("max(tandem_gateway_verifier_ready{$s}) or vector(0)"),),
                    kind="stat",
                    width=3,
                    unit="bool_yes_no",
                    thresholds=((None, "red"), (1, "green")),
                ),
                Panel(
                    "Drafters",
                    "Connected to the verifier. Without one, all is served plainly.",
                    (Query("sum(tandem_drafters{$s}) or vector(0)"),),
                    kind="stat",
                    width=3,
                    thresholds=((None, "orange"), (1, "green")),
                ),
                Panel(
                    "Tokens per second",
                    "Tokens streamed to clients.",
                    (Query("sum(rate(tandem_gateway_generation_tokens_total{$s}$i)) or vector(0)"),),
                    kind="stat",
                    width=3,
                    decimals=1,
                ),
                Panel(
                    "Generations now",
                    "In the gateways.",
                    (Query("sum(tandem_gateway_requests_in_flight{$s}) or vector(0)"),),
                    kind="stat",
                    width=3,
                ),
                Panel(
                    "Failed",
                    "Share of generations that end INTERNAL or UNAVAILABLE. The target is 0.1 %.",
                    (Query(ratio(_ERRORS, _GENERATIONS)),),
                    kind="stat",
                    width=3,
                    unit="percentunit",
                    thresholds=((None, "green"), (0.001, "orange"), (0.0144, "red")),
                ),
                Panel(
                    "First token, p95",
                    "95 of 100 generations have their first token by then. The target is 2.56 s.",
                    quantiles("tandem_time_to_first_token_seconds", "", 0.95),
                    kind="stat",
                    width=3,
                    unit="s",
                    thresholds=((None, "green"), (1.28, "orange"), (2.56, "red")),
                ),
                Panel(
                    "Between tokens, p95",
                    "Tokens of one step share its time.",
                    quantiles("tandem_inter_token_latency_seconds", "", 0.95),
                    kind="stat",
                    width=3,
                    unit="s",
                ),
                Panel(
                    "Speculation's gain",
                    "Tokens per second over plain decoding's, as the controller predicts it. At 1 or below it does not "
                    "speculate.",
                    (Query("max(tandem_spec_gain{$s}) > 0"),),
                    kind="stat",
                    width=3,
                    decimals=2,
                    thresholds=((None, "orange"), (1, "green")),
                ),
            ),
        ),
        Row(
            "Traffic",
            (
                Panel(
                    "Tokens",
                    "Prompt tokens taken and tokens streamed, per second.",
                    (
                        Query("sum(rate(tandem_gateway_generation_tokens_total{$s}$i))", "generated"),
                        Query("sum(rate(tandem_gateway_prompt_tokens_total{$s}$i))", "prompt"),
                    ),
                ),
                Panel(
                    "Calls by status",
                    "Calls that ended, per second. Refused for lack of room is RESOURCE_EXHAUSTED, not an error.",
                    (Query("sum by (code) (rate(tandem_gateway_requests_total{$s}$i))", "{{code}}"),),
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    "In flight",
                    "Generations in the gateways, and sequences in the verifier that step or wait.",
                    (
                        Query("sum(tandem_gateway_requests_in_flight{$s})", "gateway"),
                        Query("sum(tandem_num_requests_running{$s})", "verifier, running"),
                        Query("sum(tandem_num_requests_waiting{$s})", "verifier, waiting"),
                    ),
                ),
                Panel(
                    "How sequences end",
                    "In the verifier, per second. Aborted: the client went away, or a stop string ended it.",
                    (Query("sum by (finish_reason) (rate(tandem_requests_total{$s}$i))", "{{finish_reason}}"),),
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    "Resubmissions",
                    "Generations that lost their verifier and went on with another, or with it restarted.",
                    (Query("sum(rate(tandem_gateway_resubmissions_total{$s}$i))", "resubmitted"),),
                    unit="reqps",
                ),
                Panel(
                    "Sessions",
                    "Conversations that the gateways keep.",
                    (Query("sum(tandem_gateway_sessions{$s})", "sessions"),),
                ),
            ),
        ),
        Row(
            "Latency",
            (
                Panel(
                    "To the first token",
                    "From the request to its first token, queue and prompt included.",
                    quantiles("tandem_time_to_first_token_seconds", "", 0.5, 0.95, 0.99),
                    unit="s",
                    thresholds=((None, "transparent"), (2.56, "red")),
                ),
                Panel(
                    "Between tokens",
                    "The tokens of one step share its time, so that speculation shows here.",
                    quantiles("tandem_inter_token_latency_seconds", "", 0.5, 0.95, 0.99),
                    unit="s",
                ),
                Panel(
                    "Whole generation",
                    "From the request to its end, of those that ended normally.",
                    quantiles("tandem_e2e_request_latency_seconds", "", 0.5, 0.95, 0.99),
                    unit="s",
                ),
            ),
        ),
        Row(
            "Capacity",
            (
                Panel(
                    "Waiting for the first step",
                    "From coming to the verifier to the first step. More than a step's time: there is a queue.",
                    quantiles("tandem_request_queue_time_seconds", "", 0.5, 0.95),
                    unit="s",
                    thresholds=((None, "transparent"), (5, "red")),
                ),
                Panel(
                    "KV in use",
                    "Share of the KV blocks that live sequences hold, and that are kept for prefix reuse only.",
                    (
                        Query(ratio("tandem_kv_blocks_used{$s}", "tandem_kv_blocks{$s}"), "used"),
                        Query(ratio("tandem_kv_blocks_cached{$s}", "tandem_kv_blocks{$s}"), "kept for reuse"),
                    ),
                    unit="percentunit",
                    stacked=True,
                    low=0,
                    high=1,
                ),
                Panel(
                    "Preemptions",
                    "Sequences that lost their KV blocks and start over, per second. Should be 0.",
                    (Query("sum(rate(tandem_preemptions_total{$s}$i))", "preempted"),),
                ),
                Panel(
                    "Prompt tokens from the prefix cache",
                    "Share of prompt tokens whose KV was there already.",
                    (
                        Query(
                            ratio(
                                'rate(tandem_prompt_tokens_total{$s, source="cached"}$i)',
                                "rate(tandem_prompt_tokens_total{$s}$i)",
                            ),
                            "cached",
                        ),
                    ),
                    unit="percentunit",
                    low=0,
                    high=1,
                ),
                Panel(
                    "CPU",
                    "Cores that the processes use.",
                    (Query(f"sum by (job) (rate(process_cpu_seconds_total{{$s, {_JOBS}}}$i))", "{{job}}"),),
                ),
                Panel(
                    "Memory",
                    "Resident, of the processes that serve metrics: of several ranks the first.",
                    (Query(f"sum by (job) (process_resident_memory_bytes{{$s, {_JOBS}}})", "{{job}}"),),
                    unit="bytes",
                ),
            ),
        ),
        Row(
            "Service levels",
            (
                Panel(
                    "Error budget: how fast it burns",
                    "Failed share over the 0.1 % allowed. At 1 the budget lasts a month, at 14.4 two days.",
                    (
                        Query("max(tandem:generate_errors:ratio_rate1h{$s}) / 0.001", "1 h"),
                        Query("max(tandem:generate_errors:ratio_rate6h{$s}) / 0.001", "6 h"),
                    ),
                    width=12,
                    thresholds=((None, "transparent"), (6, "orange"), (14.4, "red")),
                ),
                Panel(
                    "First-token budget: how fast it burns",
                    "Share of generations that wait more than 2.56 s, over the 5 % allowed.",
                    (
                        Query("max(tandem:slow_first_tokens:ratio_rate1h{$s}) / 0.05", "1 h"),
                        Query("max(tandem:slow_first_tokens:ratio_rate6h{$s}) / 0.05", "6 h"),
                    ),
                    width=12,
                    thresholds=((None, "transparent"), (6, "orange"), (14.4, "red")),
                ),
            ),
        ),
        Row(
            "Processes",
            (
                Panel(
                    "Scraped",
                    "1 while Prometheus reaches the process.",
                    (Query(f"min by (job, instance) (up{{$s, {_JOBS}}})", "{{job}} {{instance}}"),),
                    width=12,
                    low=0,
                    high=1,
                ),
                Panel(
                    "Age",
                    "Time since the process started: a line that falls is a restart.",
                    (
                        Query(
                            f"time() - max by (job, instance) (process_start_time_seconds{{$s, {_JOBS}}})",
                            "{{job}} {{instance}}",
                        ),
                    ),
                    unit="s",
                ),
                Panel(
                    "Versions",
                    "Processes by service and version: two versions of one service are a rollout.",
                    (Query("count by (service, version) (tandem_build_info{$s})", "{{service}} {{version}}"),),
                    kind="stat",
                    width=4,
                ),
            ),
        ),
    ),
)
