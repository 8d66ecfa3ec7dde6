"""`tandem dashboard`: the gateway's page of live figures, in a browser."""

import urllib.request
import webbrowser
from http.client import HTTPException
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.console import console, fail
from tandem.cli.options import DEFAULT_CONFIG, ConfigOption

TIMEOUT_SECONDS = 5.0


def dashboard(
    config: ConfigOption = DEFAULT_CONFIG,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of the gateway's metrics, in place of the config's.")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open it, or only print where it is.")] = True,
) -> None:
    """Open the page of live figures that the gateway serves, and print where it is. Exits 1 if nothing answers."""
    url = f"http://{address or _address_of(config)}/dashboard/"
    # By hand, and not by a proxy: the gateway is near.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(url, timeout=TIMEOUT_SECONDS).close()
    except (OSError, ValueError, HTTPException) as error:
        fail(f"nothing to show at {url}: {error}; is the stack up?")
    console.print(url, markup=False, soft_wrap=True)
    if open_browser:
        webbrowser.open(url)


def _address_of(config: Path) -> str:
    from tandem.cli.parts import dialable
    from tandem.config import load_config
    from tandem.errors import StartupError

    try:
        listen = load_config(config).gateway.metrics_listen
    except StartupError as error:
        fail(str(error), code=2)
    if listen is None:
        fail(f"{config}: gateway.metrics_listen is not set, so there is no page; or name it by --address", code=2)
    return dialable(listen)
