"""What the commands print to: results to stdout, errors to stderr."""

from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str, code: int = 1) -> NoReturn:
    """Print one line per problem to stderr and exit."""
    for line in message.splitlines() or ["failed"]:
        errors.print(f"[bold red]error:[/] {escape(line)}")
    raise typer.Exit(code)
