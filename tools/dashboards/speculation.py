"""Does speculation pay, and what does it cost? The questions of its operators, each answered by panels."""

from tools.dashboards.drafters import CONTROLLER, DRAFTERS
from tools.dashboards.panels import Dashboard, Panel, Query, Row, ratio

_DRAFTED = "rate(tandem_spec_decode_num_draft_tokens_total{$s}$i)"
_ACCEPTED = "rate(tandem_spec_decode_num_accepted_tokens_total{$s}$i)"
_DRAFTS = "rate(tandem_spec_decode_num_drafts_total{$s}$i)"
_DECODING = '{$s, kind!="prefill"}$i'
_TOKENS = f"rate(tandem_step_tokens_total{_DECODING})"
_STEPS = f"rate(tandem_steps_total{_DECODING})"
_DENSE = f"rate(tandem_target_bytes_read_total{_DECODING})"
_EXPERTS = f"rate(tandem_expert_bytes_read_total{_DECODING})"


def _read(kind: str) -> str:
    """Bytes that a step of a kind reads."""
    of_kind = f'{{$s, kind="{kind}"}}$i'
    read = f"sum(rate(tandem_target_bytes_read_total{of_kind})) + sum(rate(tandem_expert_bytes_read_total{of_kind}))"
    return f"({read}) / (sum(rate(tandem_steps_total{of_kind})) > 0)"


_VERIFIED_TOKENS = ratio(
    'rate(tandem_step_tokens_total{$s, kind="verify"}$i)', 'rate(tandem_steps_total{$s, kind="verify"}$i)'
)
_WASTED = f"(1 - {ratio(_ACCEPTED, _DRAFTED)})"

SPECULATION = Dashboard(
    uid="tandem-speculation",
    title="Tandem: speculation",
    description="Whether speculation pays, what is accepted, what is wasted, and how drafters and controller do.",
    rows=(
        Row(
            "Does it pay?",
            (
                Panel(
                    "Gain",
                    "Tokens per second over plain decoding's, as the controller predicts it now. Drafts are asked for "
                    "while it is above 1.",
                    (Query("max(tandem_spec_gain{$s}) > 0"),),
                    kind="stat",
                    width=4,
                    decimals=2,
                    thresholds=((None, "orange"), (1, "green")),
                ),
                Panel(
                    "Nodes asked for",
                    "Per sequence; 0: plain decoding.",
                    (Query("max(tandem_spec_asked_nodes{$s}) or vector(0)"),),
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Acceptance length",
                    "Tokens emitted per verified draft, the bonus included. 1 is what plain decoding emits.",
                    (Query(f"1 + {ratio(_ACCEPTED, _DRAFTS)}"),),
                    kind="stat",
                    width=4,
                    decimals=2,
                    thresholds=((None, "red"), (1.5, "orange"), (2, "green")),
                ),
                Panel(
                    "Acceptance rate",
                    "Accepted over verified draft tokens. Of trees it is low by nature: siblings exclude each other.",
                    (Query(ratio(_ACCEPTED, _DRAFTED)),),
                    kind="stat",
                    width=4,
                    unit="percentunit",
                ),
                Panel(
                    "Wasted share",
                    "Verified draft tokens that were rejected.",
                    (Query(f"1 - {ratio(_ACCEPTED, _DRAFTED)}"),),
                    kind="stat",
                    width=4,
                    unit="percentunit",
                ),
                Panel(
                    "Drafters",
                    "Connected.",
                    (Query("sum(tandem_drafters{$s}) or vector(0)"),),
                    kind="stat",
                    width=4,
                    thresholds=((None, "orange"), (1, "green")),
                ),
                Panel(
                    "Goodput per second of forward",
                    "Tokens emitted per second that the target computes, in steps with drafts (verify) and without "
                    "(decode). Verify above decode at the same load: verifying is worth its time.",
                    (
                        Query(
                            ratio(_TOKENS, f"rate(tandem_verify_duration_seconds_sum{_DECODING})", "kind"), "{{kind}}"
                        ),
                    ),
                ),
                Panel(
                    "What the controller chose",
                    "Steps per second with sequences in auto mode, by choice and reason.",
                    (Query("sum by (mode, reason) (rate(tandem_spec_choices_total{$s}$i))", "{{mode}}: {{reason}}"),),
                    stacked=True,
                ),
                Panel(
                    "Tokens by kind of step",
                    "Emitted per second by steps with drafts, without, and with prompts.",
                    (Query("sum by (kind) (rate(tandem_step_tokens_total{$s}$i))", "{{kind}}"),),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "What is accepted",
            (
                Panel(
                    "Acceptance length",
                    "Tokens emitted per verified draft, the bonus included. A sudden fall with the same traffic is a "
                    "fault of features or drafter, not of the text.",
                    (Query(f"1 + {ratio(_ACCEPTED, _DRAFTS)}", "tokens"),),
                    low=1,
                ),
                Panel(
                    "Acceptance by position",
                    "Share of verified drafts whose token at this depth was accepted; 0 is the first after the anchor.",
                    (
                        Query(
                            "sum by (position) (rate(tandem_spec_decode_num_accepted_tokens_per_pos_total{$s}$i)) "
                            f"/ on () group_left () (sum({_DRAFTS}) > 0)",
                            "{{position}}",
                        ),
                    ),
                    kind="bargauge",
                    unit="percentunit",
                    low=0,
                    high=1,
                ),
                Panel(
                    "Accepted over promised, by position",
                    "Acceptances over what the draft model's own probabilities promise. Below 1: it is overconfident. "
                    "The controller corrects for it.",
                    (
                        Query(
                            ratio(
                                "rate(tandem_spec_decode_num_accepted_tokens_per_pos_total{$s}$i)",
                                "rate(tandem_spec_drafted_mass_per_pos_total{$s}$i)",
                                "position",
                            ),
                            "{{position}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "What a verify step costs and wastes",
            (
                Panel(
                    "Is the prefix read once for all draft tokens?",
                    "KV that a step reads per row of it. It is computed from sizes, as the kernels are built: a prefix "
                    "once a step for all rows of its sequence, so verify is far below decode. Whether it is so shows "
                    "in the time of a step: if draft tokens read the prefix anew, verify takes that much longer.",
                    (
                        Query(
                            ratio(
                                'rate(tandem_target_bytes_read_total{$s, what="kv", kind!="prefill"}$i)',
                                f"rate(tandem_step_rows_total{_DECODING})",
                                "kind",
                            ),
                            "{{kind}}",
                        ),
                    ),
                    unit="bytes",
                ),
                Panel(
                    "Bytes moved per emitted token",
                    "What steps with drafts (verify) and without (decode) read: weights, routed experts and KV, and "
                    "features sent to drafters. Computed from sizes, but for experts and features, which are counted.",
                    (
                        Query(
                            f"(sum by (kind) ({_DENSE}) + sum by (kind) ({_EXPERTS})) "
                            f"/ (sum by (kind) ({_TOKENS}) > 0)",
                            "read, {{kind}}",
                        ),
                        Query(ratio("rate(tandem_feature_bytes_sent_total{$s}$i)", _TOKENS), "features sent"),
                    ),
                    unit="bytes",
                ),
                Panel(
                    "Bytes wasted per emitted token",
                    "What a verify step reads beyond a plain one, times the rejected share of its drafts. Weights are "
                    "read once whatever the rows, so this is KV of rejected rows and experts that only they woke. "
                    "Needs both kinds of steps in the window, at like loads.",
                    (
                        Query(
                            f"clamp_min(({_read('verify')}) - ({_read('decode')}), 0) "
                            f"* {_WASTED} / ({_VERIFIED_TOKENS})",
                            "wasted",
                        ),
                    ),
                    unit="bytes",
                ),
                Panel(
                    "Is spare compute traded for candidates?",
                    "Rows a step computes and tokens it emits. More rows at nearly the same step time (next panel) is "
                    "compute that was idle before.",
                    (
                        Query(ratio(f"rate(tandem_step_rows_total{_DECODING})", _STEPS, "kind"), "rows, {{kind}}"),
                        Query(ratio(_TOKENS, _STEPS, "kind"), "tokens, {{kind}}"),
                    ),
                ),
                Panel(
                    "Time of a step",
                    "The target's forward, mean, with drafts and without.",
                    (Query(ratio(f"rate(tandem_verify_duration_seconds_sum{_DECODING})", _STEPS, "kind"), "{{kind}}"),),
                    unit="s",
                ),
                Panel(
                    "What do trees change?",
                    "Nodes verified per sequence and step in auto mode (0: plain), and the tokens emitted for a draft.",
                    (
                        Query(
                            ratio(
                                "rate(tandem_spec_chosen_nodes_sum{$s}$i)", "rate(tandem_spec_chosen_nodes_count{$s}$i)"
                            ),
                            "nodes",
                        ),
                        Query(f"1 + {ratio(_ACCEPTED, _DRAFTS)}", "tokens per draft"),
                    ),
                ),
            ),
        ),
        DRAFTERS,
        CONTROLLER,
    ),
)
