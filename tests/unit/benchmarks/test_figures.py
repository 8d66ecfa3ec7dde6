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


def bench() -> dict[str, Any]:
    drafted = [result(mode, c, 2.0 / c, 2.0) for mode in ("block", "auto") for c in (1, 2, 4)]
    return {
        "results": [result("off", c, 1.0, None) for c in (1, 2, 4)] + drafted,
        "plan": {"runs": 3, "prompts": 12, "max_tokens": 64},
        "model": {"model": "a target"},
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


EVAL = [
    {"temperature": temperature, "source": source, "budget": budget, "kind": kind, "acceptance_length": length}
    for temperature in (0.0, 0.8)
    for source in ("draft model", "n-gram")
    for budget, length in (("block of 8", 1.5), ("tree of 16", 2.5), ("tree of 4", 2.0))
    for kind in ("chat", "all")
]
REPLAY = {
    "replay": [
        {"wished_acceptance_length": length, "mode": mode, "concurrency": count, "ratio_to_off": length / count}
        for length in (3.0, 1.0)
        for mode in ("off", "auto")
        for count in (1, 2)
    ],
    "plan": {"runs": 3, "prompts": 12, "max_tokens": 64},
    "machine_line": "a machine",
}


def test_all_figures_are_drawn_and_the_same_data_give_the_same_files(tmp_path: Path) -> None:
    """They are committed: a new file must mean new numbers."""
    paths = figures.draw(bench(), COST, EVAL, REPLAY, tmp_path / "a")
    names = ["speed-up", "acceptance-by-kind", "acceptance-against-budget", "verify-cost", "replay"]
    assert [path.name for path in paths] == [f"{name}.svg" for name in names]
    again = figures.draw(bench(), COST, EVAL, REPLAY, tmp_path / "b")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    assert all("a machine" in path.read_text() for path in paths if "budget" not in path.name)


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert [path.name for path in figures.draw(None, COST, None, None, tmp_path)] == ["verify-cost.svg"]
    assert [path.name for path in figures.draw(bench(), None, None, None, tmp_path)] == [
        "speed-up.svg",
        "acceptance-by-kind.svg",
    ]


def test_the_lines_hold_the_measured_ratios_and_budgets() -> None:
    axes = figures.speed_up(bench()).axes[0]
    line = axes.containers[0].lines[0]
    assert list(line.get_xdata()) == [1, 2, 4]
    assert list(line.get_ydata()) == [2.0, 1.0, 0.5]
    budgets = figures.acceptance_against_budget(EVAL).axes[0].lines[0]
    assert list(budgets.get_xdata()) == [4, 16]
    assert list(budgets.get_ydata()) == [2.0, 2.5]
    cost = figures.verify_cost(COST).axes[0].lines[0]
    assert list(cost.get_ydata()) == pytest.approx([1.0, 18 / 11])
    two_clients = figures.replay_gains(REPLAY).axes[0].lines[1]
    assert list(two_clients.get_xdata()) == [1.0, 3.0]
    assert list(two_clients.get_ydata()) == [0.5, 1.5]
