"""Figures show the measured numbers; they are drawn only where matplotlib is installed."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import figures


def result(mode: str, concurrency: int, ratio: float, length: float | None) -> dict[str, Any]:
    return {
        "mode": mode,
        "concurrency": concurrency,
        "ratio_to_off": ratio,
        "ratios_to_off": [ratio - 0.1, ratio, ratio + 0.2],
        "acceptance_length": length,
        "acceptance_length_by_kind": {} if length is None else {"chat": length, "code": length + 1},
        "machine": "a machine",
    }


def bench(budget: int | None, length: float = 2.0) -> dict[str, Any]:
    drafted = [result(mode, c, 2.0 / c, length) for mode in ("block", "auto") for c in (1, 2, 4)]
    return {
        "results": [result("off", c, 1.0, None) for c in (1, 2, 4)] + drafted,
        "plan": {"runs": 3, "prompts": 12, "max_tokens": 64, "max_draft_nodes": budget},
        "model": {"model": "a target", "max_draft_nodes": 32},
    }


COST = {
    "verify_cost": [
        {"rows_per_sequence": rows, "sequences": count, "context": context, "step_ms": 10.0 * count + rows}
        for rows in (1, 8)
        for count in (1, 4)
        for context in (128, 512)
    ],
    "model": "a target",
    "dtype": "bfloat16",
    "machine_line": "a machine",
}


def test_all_figures_are_drawn_and_the_same_data_give_the_same_files(tmp_path: Path) -> None:
    """They are committed: a new file must mean new numbers."""
    benches = [bench(None, 3.0), bench(4, 2.0)]
    paths = figures.draw(benches, COST, tmp_path / "a")
    names = ["speed-up.svg", "acceptance-by-kind.svg", "acceptance-against-budget.svg", "verify-cost.svg"]
    assert [path.name for path in paths] == names
    again = figures.draw(benches, COST, tmp_path / "b")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    assert all("a target" in path.read_text() and "a machine" in path.read_text() for path in paths)


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert [path.name for path in figures.draw([], COST, tmp_path)] == ["verify-cost.svg"]
    assert [path.name for path in figures.draw([bench(4)], None, tmp_path)] == [
        "speed-up.svg",
        "acceptance-by-kind.svg",
    ]


def test_the_lines_hold_the_measured_ratios_and_budgets() -> None:
    axes = figures.speed_up(bench(None)).axes[0]
    line = axes.containers[0].lines[0]
    assert list(line.get_xdata()) == [1, 2, 4]
    assert list(line.get_ydata()) == [2.0, 1.0, 0.5]
    budgets = figures.acceptance_against_budget([bench(None, 3.0), bench(4, 2.0)]).axes[0].lines[0]
    assert list(budgets.get_xdata()) == [4, 32]
    assert list(budgets.get_ydata()) == [2.0, 3.0]
    cost = figures.verify_cost(COST).axes[0].lines[0]
    assert list(cost.get_ydata()) == pytest.approx([1.0, 18 / 11])
