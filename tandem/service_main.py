"""What the `__main__` of every service does: read the config, set up the process, run, report start-up errors."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tandem.config import StackConfig, load_config
from tandem.errors import StartupError
from tandem.logs import setup_logging


def service_main(
    name: str, section_of: Callable[[StackConfig], Any], run: Callable[[StackConfig], Coroutine[Any, Any, None]]
) -> None:
    """Run a service until it ends. Exits 2 with one line per problem if it cannot start.

    `run` must import torch itself: OpenMP reads its environment when torch loads it.
    """
    parser = argparse.ArgumentParser(prog=name, description=f"Tandem's {name}.")
    parser.add_argument("--config", type=Path, required=True, help="the stack's YAML file")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config)
        section = section_of(config)
        setup_logging(name, section.log_level)
        if hasattr(section, "omp_spin_count"):
            os.environ.setdefault("GOMP_SPINCOUNT", str(section.omp_spin_count))
        asyncio.run(run(config))
    except StartupError as error:
        for line in str(error).splitlines():
            print(f"{name}: {line}", file=sys.stderr)
        sys.exit(2)
