"""What the commands print to: results to stdout, errors to stderr."""

import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

# Where there is no terminal to fit, tables take the room they need.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str, code: int = 1) -> NoReturn:
    """Print one line per problem to stderr and exit."""
    for line in message.splitlines() or ["failed"]:
        errors.print(f"[bold red]error:[/] {escape(line)}")
    raise typer.Exit(code)
