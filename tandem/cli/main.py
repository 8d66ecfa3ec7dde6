"""The `tandem` command. Commands import what they need when they run, so that `tandem --help` is quick."""

import typer

from tandem.cli import experts, models
from tandem.cli.bench import bench
from tandem.cli.chat import chat
from tandem.cli.dashboard import dashboard
from tandem.cli.demo import demo
from tandem.cli.draft_eval import draft_eval
from tandem.cli.draft_train import draft_train
from tandem.cli.generate import generate
from tandem.cli.status import status
from tandem.cli.up import up

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding served by a gateway, a verifier and a drafter.",
)
for command in (generate, chat, status, dashboard, up, demo, bench, draft_train, draft_eval):
    app.command()(command)
app.add_typer(models.app, name="models")
app.add_typer(experts.app, name="experts")


if __name__ == "__main__":
    app()
