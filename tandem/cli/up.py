"""`tandem up`: the whole stack of a config file, until stopped."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.console import console, fail
from tandem.cli.options import EpOption, TpOption

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The stack's YAML file.")]

_COLOURS = {"gateway": "cyan", "verifier": "green", "drafter": "magenta"}


def up(config: ConfigArgument, ep: EpOption = None, tp: TpOption = None) -> None:
    """Run gateway, verifier and drafter of CONFIG as child processes until Ctrl-C; shows their logs."""
    from tandem.cli.parts import Part, check_ports_free, dialable, parts_of
    from tandem.cli.runner import Interrupted, run
    from tandem.cli.stack import Stack, StackFailed
    from tandem.config import load_config, with_ranks
    from tandem.errors import StartupError
    from tandem.logs import setup_logging

    setup_logging("tandem", "info")
    logging.getLogger("asyncio").setLevel(logging.WARNING)

    async def main(parts: list[Part]) -> None:
        async with Stack(parts, show_line) as stack:
            where = ", ".join(f"{part.name} {part.address}" for part in parts)
            gateway = next(part.address for part in parts if part.name == "gateway")
            console.print(f"[bold green]ready[/]: {where}", soft_wrap=True)
            if stack_config.gateway.metrics_listen:
                page = f"http://{dialable(stack_config.gateway.metrics_listen)}/dashboard/"
                console.print(f"dashboard: {page}", soft_wrap=True)
            console.print(f'try: tandem generate "Why is the sky blue?" --address {gateway}', soft_wrap=True)
            await stack.wait()

    try:
        stack_config = with_ranks(load_config(config), ep, tp)
        check_ports_free(stack_config)
        ranks = [f"--{name}={count}" for name, count in (("ep", ep), ("tp", tp)) if count is not None]
        run(main(parts_of(stack_config, config, tuple(ranks))))
    except StartupError as error:
        fail(str(error), code=2)
    except StackFailed as error:
        fail(str(error))
    except Interrupted:
        console.print("stopped")


def show_line(part: str, line: str) -> None:
    """One line of a part's log, the part's name before it."""
    console.print(f"{part:8} | ", style=_COLOURS.get(part), end="", soft_wrap=True)
    console.print(line, markup=False, soft_wrap=True)
