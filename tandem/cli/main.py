"""The `tandem` command. Commands import what they need when they run, so that `tandem --help` is quick."""

import typer

from tandem.cli import models
from tandem.cli.up import up

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding served by a gateway, a verifier and a drafter.",
)
app.command()(up)
app.add_typer(models.app, name="models")
