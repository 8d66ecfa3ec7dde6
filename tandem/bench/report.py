"""Results as tables for people and as JSON for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from tandem.bench.load import Plan
from tandem.bench.machine import machine, machine_line, versions
from tandem.bench.stats import Pass, Result, RoundCost, round_cost, summarise


def results_of(passes: Sequence[Pass]) -> tuple[list[Result], list[RoundCost]]:
    """One result per concurrency and mode, in the order measured, and the cost of a round at concurrency 1."""
    groups: dict[tuple[int, str], list[Pass]] = {}
    for p in passes:
        groups.setdefault((p.concurrency, p.mode), []).append(p)
    results = [summarise(group, groups.get((concurrency, "off"), [])) for (concurrency, _), group in groups.items()]
    costs = [
        round_cost(group, groups.get((1, "off"), []))
        for (concurrency, mode), group in groups.items()
        if concurrency == 1 and mode != "off"
    ]
    return results, [cost for cost in costs if cost is not None]


def table(results: Sequence[Result]) -> Table:
    """A row per concurrency and mode."""
    grid = Table(title="closed loop; medians of the repeats", title_justify="left")
    headings = ("clients", "mode", "tokens/s", "x off", "TTFT p50/p99 ms", "inter-token p50/p99 ms")
    for heading in (*headings, "accepted len", "rate", "by position %", "steps"):
        grid.add_column(heading, justify="left" if heading == "mode" else "right")
    for index, r in enumerate(results):
        grid.add_row(
            str(r.concurrency),
            r.mode,
            f"{r.tokens_per_second:.1f}",
            _number(r.ratio_to_off, 2),
            f"{r.ttft_p50_ms:.0f} / {r.ttft_p99_ms:.0f}",
            f"{_number(r.inter_token_p50_ms, 1)} / {_number(r.inter_token_p99_ms, 1)}",
            _number(r.acceptance_length, 2),
            _number(r.acceptance_rate, 3),
            " ".join(f"{share:.0%}".rstrip("%") for share in r.acceptance_per_position) or "-",
            str(r.steps),
            end_section=index + 1 < len(results) and r.concurrency != results[index + 1].concurrency,
        )
    return grid


def lines(results: Sequence[Result], costs: Sequence[RoundCost]) -> list[str]:
    """What the table does not say: the cost of a round, and whether outputs differed between modes."""
    said = []
    for cost in costs:
        plain = (
            f"a round costs {cost.round_in_plain_steps:.2f} plain steps of {cost.plain_step_ms:.1f} ms"
            if cost.round_in_plain_steps is not None
            else f"a round takes {cost.round_ms:.1f} ms"
        )
        said.append(
            f"{cost.mode}, 1 client: {plain}: draft {cost.draft_ms:.1f} + transfer {cost.transfer_ms:.1f} + "
            f"verify {cost.verify_ms:.1f} + host {cost.host_ms:.1f} ms (medians of {cost.rounds} rounds)"
        )
    compared = [r for r in results if r.mode != "off" and r.same_tokens_as_off is not None]
    said += [
        f"{r.mode}, {r.concurrency} clients: some requests got other tokens than with speculation off"
        for r in compared
        if not r.same_tokens_as_off
    ]
    if compared and all(r.same_tokens_as_off for r in compared):
        said.append("every request got the same tokens in every mode")
    return said


def as_json(
    results: Sequence[Result], costs: Sequence[RoundCost], plan: Plan, config: dict[str, Any], model: dict[str, Any]
) -> dict[str, Any]:
    """The whole measurement. config: the stack's settings where known; model: what the gateway says it serves."""
    where = machine_line()
    return {
        "results": [asdict(result) | {"machine": where} for result in results],
        "rounds": [asdict(cost) for cost in costs],
        "plan": asdict(plan),
        "model": model,
        "machine": machine(),
        "versions": versions(),
        "config": config,
    }


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
