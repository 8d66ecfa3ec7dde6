"""`tandem draft-eval`: how much of a draft model's proposals a target accepts, without running a service."""

import json
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.console import console, fail


def draft_eval(
    target: Annotated[Path, typer.Option(help="The target's folder.")],
    draft_model: Annotated[Path, typer.Option(help="The draft model's folder (DFlash or DFlash2).")],
    prompts: Annotated[
        Path | None,
        typer.Option(help='Prompts, JSON lines: {"messages": ..., "kind": ...}; unset: the built-in ones.'),
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Of the target's answers, comma-separated.")] = "0",
    trees: Annotated[str, typer.Option(help="Node budgets of the trees, comma-separated.")] = "8,16,32,64",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer at most.")] = 128,
    seed: Annotated[int, typer.Option(help="Of sampled answers.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Measure acceptance length offline: the target answers the prompts once, then blocks and trees are drafted against
    its answers round by round, by prompt kind, with the n-gram drafter as the baseline."""
    try:
        import torch

        from draft_training.evaluation import evaluate_folder
        from tandem.cli.draft_train import show_table
        from tandem.errors import StartupError
    except ModuleNotFoundError as error:
        fail(f"{error}: install tandem[worker]", code=2)
    if dtype not in ("float32", "bfloat16"):
        fail(f"--dtype: must be float32 or bfloat16, is {dtype}", code=2)
    try:
        budgets = [int(nodes) for nodes in trees.split(",") if nodes]
        heats = [float(value) for value in temperatures.split(",")]
    except ValueError as error:
        fail(f"--trees, --temperatures: must be numbers, comma-separated: {error}", code=2)
    if any(nodes < 1 for nodes in budgets) or any(not 0 <= heat <= 2 for heat in heats):
        fail("--trees: must be at least 1; --temperatures: must be 0 to 2", code=2)
    if json_file:
        try:
            json_file.open("a").close()  # fail now, not after the measurement
        except OSError as error:
            fail(f"--json {json_file}: {error.strerror}", code=2)
    report = []
    try:
        for temperature in heats:
            measured = evaluate_folder(
                target,
                draft_model,
                prompts or Path(str(resources.files("tandem") / "prompts.jsonl")),
                temperature,
                seed,
                budgets,
                max_tokens,
                getattr(torch, dtype),
            )
            console.print(f"temperature {temperature:g}")
            show_table(measured)
            report += [
                {
                    "temperature": temperature,
                    "source": entry.source,
                    "budget": entry.budget,
                    "kind": group,
                    "acceptance_length": round(found.length, 4),
                    "accepted_per_depth": [round(share, 4) for share in found.per_depth],
                    "rounds": found.rounds,
                    "drafted": found.drafted,
                }
                for entry in measured
                for group, found in entry.by_group.items()
            ]
    except StartupError as error:
        fail(str(error), code=2)
    if json_file:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
