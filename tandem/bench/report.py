"""Results as tables for people and as JSON for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rich.table import Table

from tandem.bench.load import Plan
from tandem.bench.machine import machine, machine_line, versions
from tandem.bench.stats import Pass, Result, RoundCost, round_cost, summarise

Row = TypeVar("Row", Result, RoundCost)


def results_of(passes: Sequence[Pass]) -> tuple[list[Result], list[RoundCost]]:
    """One result per concurrency and mode, in the plan's order, and the cost of a drafted round of each."""
    groups: dict[tuple[int, str], list[Pass]] = {}
    for p in sorted(passes, key=lambda p: p.run):
        groups.setdefault((p.concurrency, p.mode), []).append(p)
    results, costs = [], []
    for concurrency in dict.fromkeys(p.concurrency for p in passes):
        off = groups.get((concurrency, "off"), [])
        for mode in sorted({m for c, m in groups if c == concurrency}, key=_mode_rank):
            results.append(summarise(groups[concurrency, mode], off))
            if mode != "off":
                costs.append(round_cost(groups[concurrency, mode], off))
    return results, [cost for cost in costs if cost is not None]


def tables(results: Sequence[Result], costs: Sequence[RoundCost]) -> Iterator[Table]:
    """Speed; and, if anything was drafted, drafting and where the time of a drafted step goes."""
    yield _speed(results)
    if drafted := [r for r in results if r.acceptance_length is not None]:
        yield _drafting(drafted)
    if costs:
        yield _rounds(costs)


def lines(results: Sequence[Result], costs: Sequence[RoundCost]) -> list[str]:
    """What the tables do not say: the cost of a round, failures, and whether outputs differed between modes."""
    said = []
    for cost in costs:
        if cost.concurrency == 1 and cost.round_in_plain_steps is not None:
            plain = f"{cost.round_in_plain_steps:.2f} plain steps of {cost.plain_step_ms:.1f} ms"
            said.append(f"{cost.mode}, 1 client: a round costs {plain}")
    for r in results:
        if r.failed_requests:
            of = r.requests + r.failed_requests
            reasons = "; ".join(r.failures)
            said.append(f"{r.mode}, {r.concurrency} clients: {r.failed_requests} of {of} requests failed: {reasons}")
    compared = [r for r in results if r.mode != "off" and r.compared_requests]
    said += [
        f"{r.mode}, {r.concurrency} clients: {r.differing_requests} of {r.compared_requests} requests got other tokens "
        "than with speculation off"
        for r in compared
        if r.differing_requests
    ]
    if compared and not any(r.differing_requests for r in compared):
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


def _speed(results: Sequence[Result]) -> Table:
    grid = _grid(
        "closed loop; medians of the runs, ratios with their range",
        ("clients", "mode", "tokens/s", "x off", "TTFT p50/p99 ms", "inter-token p50/p99 ms", "tokens/step", "steps"),
    )
    for r, last in _with_section_ends(results):
        grid.add_row(
            str(r.concurrency),
            r.mode,
            f"{r.tokens_per_second:.1f}",
            _ratio(r),
            f"{r.ttft_p50_ms:.0f} / {r.ttft_p99_ms:.0f}",
            f"{_number(r.inter_token_p50_ms, 1)} / {_number(r.inter_token_p99_ms, 1)}",
            _number(r.tokens_per_step, 2),
            str(r.steps),
            end_section=last,
        )
    return grid


def _drafting(results: Sequence[Result]) -> Table:
    kinds = sorted({kind for r in results for kind in r.acceptance_length_by_kind})
    grid = _grid(
        "drafting; nodes are draft tokens verified per drafted step",
        ("clients", "mode", "accepted len", *kinds, "rate", "by depth %", "nodes", "steps drafted"),
    )
    for r, last in _with_section_ends(results):
        grid.add_row(
            str(r.concurrency),
            r.mode,
            _number(r.acceptance_length, 2),
            *(_number(r.acceptance_length_by_kind.get(kind), 2) for kind in kinds),
            _number(r.acceptance_rate, 3),
            " ".join(f"{share:.0%}".rstrip("%") for share in r.acceptance_per_position) or "-",
            _number(r.nodes_per_draft, 1),
            f"{r.drafted_step_share:.0%}" if r.drafted_step_share is not None else "-",
            end_section=last,
        )
    return grid


def _rounds(costs: Sequence[RoundCost]) -> Table:
    grid = _grid(
        "a drafted step of one sequence, medians in ms",
        ("clients", "mode", "draft", "transfer", "verify", "host", "all", "plain step", "rounds"),
    )
    for cost, last in _with_section_ends(costs):
        times = (cost.draft_ms, cost.transfer_ms, cost.verify_ms, cost.host_ms, cost.round_ms, cost.plain_step_ms)
        numbers = (_number(time, 1) for time in times)
        grid.add_row(str(cost.concurrency), cost.mode, *numbers, str(cost.rounds), end_section=last)
    return grid


def _grid(title: str, headings: Sequence[str]) -> Table:
    grid = Table(title=title, title_justify="left")
    for heading in headings:
        grid.add_column(heading, justify="left" if heading == "mode" else "right")
    return grid


def _with_section_ends(rows: Sequence[Row]) -> Iterator[tuple[Row, bool]]:
    """Each row, and whether a section ends with it: the next one is of another concurrency."""
    for index, row in enumerate(rows):
        yield row, index + 1 < len(rows) and row.concurrency != rows[index + 1].concurrency


def _ratio(r: Result) -> str:
    if r.ratio_to_off is None:
        return "-"
    if r.mode == "off" or len(r.ratios_to_off) == 1:
        return f"{r.ratio_to_off:.2f}"
    return f"{r.ratio_to_off:.2f} ({min(r.ratios_to_off):.2f}-{max(r.ratios_to_off):.2f})"


def _mode_rank(mode: str) -> int:
    order = ("off", "block", "tree", "auto")
    return order.index(mode) if mode in order else len(order)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
