"""`tandem draft-train`: a draft model for a target, from nothing or from where the run was left."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.console import console, errors, fail

if TYPE_CHECKING:
    from draft_training.curve import Evaluation
    from draft_training.measurement import Measured


def draft_train(
    config: Annotated[Path, typer.Option(help="The run's YAML file.")],
    minutes: Annotated[
        float | None, typer.Option(min=0.5, help="Stop training after so long; saving, export and card come on top.")
    ] = None,
    data_only: Annotated[bool, typer.Option("--data-only", help="Write data and stop.")] = False,
    skip_data: Annotated[bool, typer.Option("--skip-data", help="Train on the data that is there.")] = False,
) -> None:
    """Train a draft model: the target writes conversations, the draft model learns from them, and is exported with a
    card. A run is taken up where it was left; Ctrl-C saves and exports."""
    import signal

    try:
        from draft_training import run as training
        from draft_training.config import TrainConfig
        from tandem.errors import StartupError
        from tandem.logs import setup_logging
        from tandem.torch_setup import pick_device
    except ModuleNotFoundError as error:
        fail(f"{error}: install tandem[worker]", code=2)

    started = time.monotonic()
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        errors.print("stopping after this step; once more to stop at once")

    def stop() -> bool:
        over = minutes is not None and time.monotonic() - started >= 60 * minutes
        return interrupted or over

    setup_logging("draft-train", "info")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        settings = TrainConfig.load(config)
        training.check(settings)
        if not skip_data:
            training.write_data(settings, config, stop, None if data_only else training.data_minutes(settings, minutes))
        state = training.data_state(settings)
        console.print(f"data: {state.conversations:,} conversations, {state.answer_tokens:,} answer tokens")
        if data_only or interrupted:
            return
        console.print("step     minutes  loss    acceptance length: block  tree of 32")
        trainer, answers = training.train(settings, stop, show)
        measured = training.measure_output(settings, answers, pick_device(settings.device, "device"))
        training.write_card(settings, trainer, measured)
        show_table(measured)
        console.print(f"[bold green]exported[/] to {settings.output}, {trainer.progress.step} steps in all")
    except StartupError as error:
        fail(str(error), code=2)


def show(evaluation: "Evaluation") -> None:
    """One line of progress."""
    e = evaluation
    console.print(f"{e.step:<8} {e.seconds / 60:<8.1f} {e.loss:<26.3f} {e.block:<6.3f} {e.tree:.3f}")


def show_table(measured: "list[Measured]") -> None:
    """Acceptance lengths by kind."""
    from rich.table import Table

    from draft_training.measurement import table

    head, *body = table(measured, list(measured[0].by_group))
    shown = Table(title="acceptance length")
    for column in head:
        shown.add_column(column)
    for row in body:
        shown.add_row(*row)
    console.print(shown)
