"""Draws docs/figures from measurements; `make figures` does it.

    python -m benchmarks.figures --bench bench.json --verify-cost verify-cost.json --draft-eval draft-eval.json \\
        --replay replay.json --output docs/figures

Each draws what it holds, whatever else is given. Needs matplotlib (`pip install '.[figures]'`).
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Text stays text, and the same data gives the same file.
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "tandem", "axes.grid": True, "grid.alpha": 0.3}

MODES = ("off", "block", "tree", "auto")
COLOURS = dict(zip(MODES, ("#6b7280", "#2563eb", "#059669", "#d97706"), strict=True))
MARKERS = dict(zip(MODES, "osD^", strict=True))

Bench = dict[str, Any]
"""What `tandem bench --json` writes."""
EvalRow = dict[str, Any]
"""A line of `tandem draft-eval --json`."""


def speed_up(bench: Bench) -> Figure:
    """Tokens/s by those of mode off against concurrency, with the range of the runs."""
    figure, axes = _axes("clients", "tokens/s by those of plain decoding", "Speed-up against concurrency", bench)
    for mode in _drafting_modes(bench):
        results = [r for r in _of_mode(bench, mode) if r["ratio_to_off"] is not None]
        if not results:
            continue
        medians = [r["ratio_to_off"] for r in results]
        below = [r["ratio_to_off"] - min(r["ratios_to_off"]) for r in results]
        above = [max(r["ratios_to_off"]) - r["ratio_to_off"] for r in results]
        clients = [r["concurrency"] for r in results]
        axes.errorbar(
            clients, medians, [below, above], label=mode, color=COLOURS[mode], marker=MARKERS[mode], capsize=3
        )
    axes.axhline(1.0, color=COLOURS["off"], linestyle="--", label="off")
    _log_axis(axes, [r["concurrency"] for r in bench["results"]])
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def acceptance_by_kind(bench: Bench) -> Figure:
    """Acceptance length by mode and kind of prompt, at the lowest concurrency."""
    lowest = min(r["concurrency"] for r in bench["results"])
    title = f"Acceptance length by kind of prompt, {lowest} client{'s' if lowest > 1 else ''}"
    figure, axes = _axes("", "tokens emitted per drafted step", title, bench)
    results = [r for r in bench["results"] if r["concurrency"] == lowest and r["acceptance_length_by_kind"]]
    kinds = sorted({kind for r in results for kind in r["acceptance_length_by_kind"]})
    width = 0.8 / max(1, len(results))
    for number, result in enumerate(results):
        lengths = [result["acceptance_length_by_kind"].get(kind, 0.0) for kind in kinds]
        places = [place + (number - (len(results) - 1) / 2) * width for place in range(len(kinds))]
        bars = axes.bar(places, lengths, width, label=result["mode"], color=COLOURS[result["mode"]])
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.grid(visible=False, axis="x")
    axes.legend()
    return figure


def acceptance_against_budget(rows: list[EvalRow]) -> Figure:
    """Acceptance length of trees against their nodes, a line per source and kind of text, and of the whole block."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.set(
        xlabel="nodes of a tree", ylabel="tokens per verify step", title="Acceptance against budget, temperature 0"
    )
    greedy = [row for row in rows if row["temperature"] == 0]
    sources = list(dict.fromkeys(row["source"] for row in greedy))
    kinds = list(dict.fromkeys(row["kind"] for row in greedy))
    budgets: set[int] = set()
    for source, style in zip(sources, ("-", ":", "--"), strict=False):
        for number, kind in enumerate(kinds):
            colour = "black" if kind == "all" else f"C{number}"
            own = {
                row["budget"]: row["acceptance_length"]
                for row in greedy
                if (row["source"], row["kind"]) == (source, kind)
            }
            trees = sorted(
                (int(name.removeprefix("tree of ")), y) for name, y in own.items() if name.startswith("tree")
            )
            budgets |= {nodes for nodes, _ in trees}
            label = f"{source}, {kind}"
            axes.plot([n for n, _ in trees], [y for _, y in trees], style, marker="o", color=colour, label=label)
            for block in (name for name in own if name.startswith("block") and kind == "all"):
                axes.axhline(own[block], color="black", linestyle=style, alpha=0.4, label=f"{source}, {block}, all")
    _log_axis(axes, sorted(budgets))
    axes.set_ylim(bottom=1)
    axes.legend(fontsize=7, ncols=2)
    return figure


def replay_gains(measured: dict[str, Any]) -> Figure:
    """Tokens/s of auto by those of off against the acceptance length that drafts are set to, a line per concurrency."""
    rows = [row for row in measured["replay"] if row["mode"] == "auto" and row["ratio_to_off"] is not None]
    clients = sorted({row["concurrency"] for row in rows})
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.set(
        xlabel="acceptance length of whole blocks (set, replay drafter)",
        ylabel="tokens/s by those of plain decoding",
        title="What auto is worth at an acceptance length",
    )
    colours = plt.get_cmap("viridis")
    for number, count in enumerate(clients):
        line = sorted(
            (row["wished_acceptance_length"], row["ratio_to_off"]) for row in rows if row["concurrency"] == count
        )
        label = f"{count} client{'s' if count > 1 else ''}"
        colour = colours(number / len(clients))
        axes.plot([x for x, _ in line], [y for _, y in line], marker="o", color=colour, label=label)
    axes.axhline(1.0, color=COLOURS["off"], linestyle="--", label="off")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    _caption(figure, f"{_runs(measured['plan'])}; {measured['machine_line']}")
    return figure


def verify_cost(measured: dict[str, Any]) -> Figure:
    """Time of a verify step in plain steps of as many sequences, against nodes, a line per number of sequences and a
    panel per context."""
    costs = measured["verify_cost"]
    contexts = sorted({c["context"] for c in costs})
    batches = sorted({c["sequences"] for c in costs})
    figure, panels = plt.subplots(
        1, len(contexts), figsize=(5 * len(contexts), 4), sharey=True, squeeze=False, layout="constrained"
    )
    colours = plt.get_cmap("viridis")
    for axes, context in zip(panels[0], contexts, strict=True):
        for number, batch in enumerate(batches):
            line = sorted(
                (c["rows_per_sequence"], c["step_ms"])
                for c in costs
                if (c["context"], c["sequences"]) == (context, batch)
            )
            plain = line[0][1]
            label = f"{batch} sequence{'s' if batch > 1 else ''}, plain step {plain:.1f} ms"
            colour = colours(number / max(1, len(batches)))
            axes.plot([r for r, _ in line], [ms / plain for _, ms in line], label=label, color=colour, marker="o")
        _log_axis(axes, [c["rows_per_sequence"] for c in costs])
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(title=f"context {context}", xlabel="rows per sequence (nodes + 1)")
        axes.legend(fontsize=8)
    panels[0][0].set_ylabel("step time in plain steps")
    _caption(figure, f"{measured['model']}, {measured['dtype']}; {measured['machine_line']}")
    return figure


def draw(
    bench: Bench | None,
    cost: dict[str, Any] | None,
    draft_eval: list[EvalRow] | None,
    replay: dict[str, Any] | None,
    output: Path,
) -> list[Path]:
    """Writes all figures for which there is data; returns their paths."""
    wanted: dict[str, Callable[[], Figure]] = {}
    if bench:
        wanted["speed-up"] = lambda: speed_up(bench)
        wanted["acceptance-by-kind"] = lambda: acceptance_by_kind(bench)
    if draft_eval:
        wanted["acceptance-against-budget"] = lambda: acceptance_against_budget(draft_eval)
    if cost:
        wanted["verify-cost"] = lambda: verify_cost(cost)
    if replay:
        wanted["replay"] = lambda: replay_gains(replay)
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure_of in wanted.items():
        figure = figure_of()
        paths.append(output / f"{name}.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
        plt.close(figure)
    return paths


def _axes(x: str, y: str, title: str, bench: Bench) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.set(xlabel=x, ylabel=y, title=title)
    _caption(figure, f"{bench['model']['model']}; {_runs(bench['plan'])}; {bench['results'][0]['machine']}")
    return figure, axes


def _runs(plan: dict[str, Any]) -> str:
    return f"{plan['runs']} runs of {plan['prompts']} prompts, {plan['max_tokens']} tokens at most"


def _caption(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=7, color="#6b7280")


def _log_axis(axes: Axes, values: list[int]) -> None:
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def _drafting_modes(bench: Bench) -> list[str]:
    return [mode for mode in MODES[1:] if _of_mode(bench, mode)]


def _of_mode(bench: Bench, mode: str) -> list[dict[str, Any]]:
    return sorted((r for r in bench["results"] if r["mode"] == mode), key=lambda r: r["concurrency"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path)
    parser.add_argument("--verify-cost", type=Path)
    parser.add_argument("--draft-eval", type=Path)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/figures"))
    options = parser.parse_args()
    given = [options.bench, options.verify_cost, options.draft_eval, options.replay]
    if not any(given):
        parser.error("nothing to draw: give --bench, --verify-cost, --draft-eval or --replay")
    for path in draw(*(json.loads(file.read_text()) if file else None for file in given), options.output):
        print(path)


if __name__ == "__main__":
    main()
