"""`tandem experts`: which rank holds which experts of a mixture."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tandem.cli.console import console, fail
from tandem.errors import StartupError

app = typer.Typer(no_args_is_help=True, help="Which rank holds which experts of a mixture.")


@app.callback()
def experts() -> None:
    """Which rank holds which experts of a mixture."""


@app.command()
def plan(
    loads: Annotated[Path, typer.Option(help="What a verifier wrote to its verifier.parallel.expert_loads.")],
    ranks: Annotated[int, typer.Option(min=1, help="As many as verifier.parallel.ep will be.")],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write, for verifier.parallel.placement. Unset: show the balance only."),
    ] = None,
) -> None:
    """Place experts so that ranks get equally many tokens, and show the busiest rank's over the mean, by layer."""
    from tandem.expert_files import ExpertPlacement, read_loads, write_placement
    from tandem.expert_placement import balanced, imbalance, in_order

    placed, balance = {}, []
    try:
        counted = read_loads(loads)
        for layer, tokens in sorted(counted.layers.items()):
            if len(tokens) % ranks:
                raise StartupError(f"{loads}: layer {layer}: {len(tokens)} experts cannot be split over {ranks} ranks")
            placed[layer] = balanced(tokens, ranks)
            before = imbalance(tokens, in_order(len(tokens), ranks))
            balance.append((layer, before, imbalance(tokens, placed[layer])))
        if output is not None:
            write_placement(output, ExpertPlacement(model=counted.model, ranks=ranks, layers=placed))
    except StartupError as error:
        fail(str(error), code=2)
    except OSError as error:
        fail(f"{output}: {error.strerror}", code=2)
    console.print(_table(f"busiest rank / mean, {ranks} ranks", balance))
    if output is not None:
        console.print(f"{output} is written")


def _table(title: str, balance: list[tuple[int, float, float]]) -> Table:
    """balance: of each layer its number, the imbalance in order of ids and as planned."""
    table = Table(title=title, title_justify="left")
    for name in ("layer", "in order", "planned"):
        table.add_column(name, justify="right")
    for layer, before, after in balance:
        table.add_row(str(layer), f"{before:.3f}", f"{after:.3f}")
    table.add_section()
    _, befores, afters = zip(*balance, strict=True)
    table.add_row("mean", *(f"{sum(values) / len(values):.3f}" for values in (befores, afters)))
    table.add_row("worst", *(f"{max(values):.3f}" for values in (befores, afters)))
    return table
