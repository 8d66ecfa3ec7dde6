"""Where the time of a step goes, as `tandem bench --profile` shows it. No torch here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

LINEARS, ATTENTION, LAYERS = "linears", "attention", "layers"
SAMPLING, RUNNER, SCHEDULER, DRAFTING, ENGINE = "sampling", "runner", "scheduler", "drafting", "engine"
PARTS = {
    LINEARS: "products with weights: projections, experts, head, fused features",
    ATTENTION: "attention over the KV",
    LAYERS: "the rest of the layers: embedding, norms, rotary, activations, writes to the KV, routers",
    SAMPLING: "what each row chooses, and the walk along drafts",
    RUNNER: "rows to tensors and back, KV moves, features kept",
    SCHEDULER: "which sequences step, and their KV blocks",
    DRAFTING: "what drafters are sent",
    ENGINE: "the rest of the verifier's loop: tokens handed out, estimates, metrics",
}
"""In the order they are shown."""
TARGET = (LINEARS, ATTENTION)
"""What a step cannot do without; all else is overhead."""


@dataclass(frozen=True)
class StepProfile:
    """Steps of one kind: means over the middle half of them by time, so that the parts add up."""

    mode: str
    clients: int
    rows: int
    """Of the step, all sequences together."""
    context: int
    """Tokens that each sequence begins with."""
    steps: int
    """Measured, of which the middle half counts."""
    step_ms: float
    parts_ms: dict[str, float]

    @property
    def overhead(self) -> float:
        """Share of the step outside linears and attention."""
        return 1 - sum(self.parts_ms[part] for part in TARGET) / self.step_ms


def profile_of(
    mode: str, clients: int, rows: int, context: int, steps: Sequence[dict[str, float]], parts: Sequence[str]
) -> StepProfile:
    """steps: of each, seconds by part. At least one."""
    by_time = sorted(steps, key=lambda step: sum(step.values()))
    middle = by_time[len(by_time) // 4 : len(by_time) - len(by_time) // 4]
    means = {part: sum(step.get(part, 0.0) for step in middle) / len(middle) * 1e3 for part in parts}
    return StepProfile(mode, clients, rows, context, len(steps), sum(means.values()), means)


def table(profiles: Sequence[StepProfile]) -> Table:
    """A row per kind of step: ms, then ms and per cent by part."""
    parts = [part for part in PARTS if any(part in p.parts_ms for p in profiles)]
    grid = Table(title="where a step's time goes, ms (per cent of the step)", title_justify="left")
    for heading in ("clients", "mode", "rows", "step", *parts, "outside linears, attention"):
        grid.add_column(heading, justify="left" if heading == "mode" else "right")
    for p in profiles:
        shares = [f"{p.parts_ms[part]:.2f} ({p.parts_ms[part] / p.step_ms:.0%})".replace("%", "") for part in parts]
        grid.add_row(str(p.clients), p.mode, str(p.rows), f"{p.step_ms:.2f}", *shares, f"{p.overhead:.1%}")
    return grid


def lines(profiles: Sequence[StepProfile]) -> Iterator[str]:
    """What the parts are, and the figure that is to be small."""
    for part in PARTS:
        if any(part in p.parts_ms for p in profiles):
            yield f"{part}: {PARTS[part]}"
    for p in profiles:
        if p.mode == "block":
            clients = f"{p.clients} client{'s' if p.clients > 1 else ''}"
            yield f"block verify, {clients}: overhead outside linears and attention {p.overhead:.1%} of a step"


def from_json(data: dict[str, Any]) -> list[StepProfile]:
    """The profiles of what `python -m verifier_service.profiling` wrote."""
    return [StepProfile(**{k: v for k, v in p.items() if k != "overhead"}) for p in data["profiles"]]
