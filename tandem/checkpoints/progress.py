"""How far the loading of a model is, for people: a bar on a terminal, a log line every few seconds elsewhere."""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_LOG_SECONDS = 5.0
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

logger = logging.getLogger(__name__)


@contextmanager
def loading_progress(what: str, layers: int) -> Iterator[Callable[[str, int], None]]:
    """Yields what a WeightReader tells: name and bytes of each part read. Layers are read in order, so they say how far
    it is; the bytes of a rank's share are not known before it is read."""
    reading = _Reading(what, layers)
    if sys.stderr.isatty():
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed} of {task.total} layers, {task.fields[read]}"),
            console=Console(stderr=True),
            transient=True,
        )
        task = bar.add_task(what, total=layers, read=reading.read)

        def show(name: str, size: int) -> None:
            reading.add(name, size)
            bar.update(task, completed=reading.layer, read=reading.read)

        with bar:
            yield show
    else:
        yield reading.log
    logger.info("%s: %s", what, reading.read)


class _Reading:
    def __init__(self, what: str, layers: int):
        self.layer = 0
        self._what = what
        self._layers = layers
        self._bytes = 0
        self._started = self._logged = time.monotonic()

    @property
    def read(self) -> str:
        seconds = time.monotonic() - self._started
        gigabytes = self._bytes / 1e9
        return f"{gigabytes:.1f} GB in {seconds:.0f} s, {gigabytes / max(seconds, 1e-3):.1f} GB/s"

    def add(self, name: str, size: int) -> None:
        self._bytes += size
        if found := _LAYER.search(name):
            self.layer = int(found[1])

    def log(self, name: str, size: int) -> None:
        self.add(name, size)
        if time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            logger.info("%s: layer %d of %d, %s", self._what, self.layer, self._layers, self.read)
