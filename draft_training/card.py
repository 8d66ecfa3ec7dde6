"""The model card that is written beside a trained draft model."""

from collections.abc import Sequence
from dataclasses import dataclass

from draft_training.curve import Evaluation
from draft_training.measurement import ALL, Measured, table


@dataclass(frozen=True)
class TrainingRecord:
    """What a card says of a run."""

    target: str
    architecture: str
    parameters: int
    taps: Sequence[int]
    conversations: int
    answer_tokens: int
    greedy_share: float
    tokens_by_kind: dict[str, int]
    steps: int
    anchors: int
    hours: float
    machine: str
    initial_model: str | None
    evaluations: Sequence[Evaluation]
    max_tokens: int
    """Of the measured answers."""


def render(name: str, record: TrainingRecord, measured: Sequence[Measured]) -> str:
    """Markdown."""
    groups = list(measured[0].by_group)
    block = measured[0].by_group[ALL]
    shares = ", ".join(f"{share:.3f}" for share in block.per_depth)
    kinds = ", ".join(f"{kind or 'unnamed'} {tokens:,}" for kind, tokens in record.tokens_by_kind.items())
    taps = " ".join(map(str, record.taps))
    begun = f"the weights of {record.initial_model}" if record.initial_model else "the target's last layers"
    return f"""# {name}

A {record.architecture} draft model for {record.target}, in the published folder format (config.json and
model.safetensors in bf16). {record.parameters / 1e6:.1f}M parameters, taps {taps}; embedding and head are the target's.

**Data.** {record.conversations:,} conversations, {record.answer_tokens:,} answer tokens, all written by the target
itself ({record.greedy_share:.0%} of them at temperature 0). By kind: {kinds}.

**Training.** {record.steps:,} steps, {record.anchors:,} anchors, {record.hours:.2f} hours on {record.machine},
begun with {begun}. Exported are the averaged weights.

**Acceptance length** (tokens per verify step, the bonus included) on the target's own answers of up to
{record.max_tokens} tokens, at temperature 0, to prompts that were never trained on; the n-gram drafter on the same
answers beside it:

{_markdown(table(measured, groups))}

Share of blocks whose first k tokens are all accepted, k = 1, 2, ...: {shares}.

**Curve**, on the same answers while training:

{_markdown(_curve(record.evaluations))}
"""


def _curve(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    rows = [["step", "hours", "loss", "block", "tree of 32"]]
    for e in evaluations:
        rows.append([f"{e.step}", f"{e.seconds / 3600:.2f}", f"{e.loss:.3f}", f"{e.block:.2f}", f"{e.tree:.2f}"])
    return rows


def _markdown(rows: list[list[str]]) -> str:
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
