"""What the `__main__` of every service does: read the config, set up the process, run, report start-up errors."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tandem.config import StackConfig, load_config
from tandem.errors import StartupError
from tandem.logs import setup_logging


def service_main(
    name: str,
    section_of: Callable[[StackConfig], Any],
    run: Callable[[StackConfig], Coroutine[Any, Any, None]],
) -> None:
    """Run a service until it ends. Exits 2 with one line per problem if it cannot start.

    `run` must import torch itself: OpenMP reads its environment when torch loads it.
    """
    arguments = service_parser(name).parse_args()
    with start_up_errors(name):
        config = load_config(*arguments.config)
        set_up_process(name, section_of(config))
        asyncio.run(run(config))


def service_parser(name: str) -> argparse.ArgumentParser:
    """What every service takes on its command line."""
    parser = argparse.ArgumentParser(prog=name, description=f"Tandem's {name}.")
    more = "may be repeated: keys of later files are added to those of the first, or replace them"
    parser.add_argument("--config", type=Path, action="append", required=True, help=f"the stack's YAML file; {more}")
    return parser


def set_up_process(name: str, section: Any) -> None:
    """Logging, OpenMP's environment if the service computes, and an end at once on SIGTERM until the service serves:
    without a handler the first process of a container is not ended by it."""
    setup_logging(name, section.log_level)
    signal.signal(signal.SIGTERM, _end_now)
    if hasattr(section, "omp_spin_count"):
        os.environ.setdefault("GOMP_SPINCOUNT", str(section.omp_spin_count))


@contextlib.contextmanager
def start_up_errors(name: str) -> Iterator[None]:
    """Inside, a StartupError ends the process with exit code 2, one line per problem."""
    try:
        yield
    except StartupError as error:
        for line in str(error).splitlines():
            print(f"{name}: {line}", file=sys.stderr)
        sys.exit(2)


def _end_now(number: int, _: FrameType | None) -> NoReturn:
    logging.getLogger(__name__).info("%s before serving: ending", signal.Signals(number).name)
    logging.shutdown()
    os._exit(128 + number)
