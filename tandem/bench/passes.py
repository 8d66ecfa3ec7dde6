"""Finished passes kept in a file, so that a measurement that was interrupted goes on where it stopped.

One JSON object a line: first what is measured (the plan and the model), then a pass each.
"""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.bench.load import Plan
from tandem.bench.stats import Failure, Pass, Request
from tandem.errors import StartupError
from tandem.step_timing import StepTiming


class PassFile:
    """The passes of one plan against one model."""

    def __init__(self, path: Path, plan: Plan, model: str):
        """Reads the passes of all complete runs; what is left of an interrupted run is dropped, since modes are
        compared side by side. StartupError if the file belongs to another measurement or cannot be written."""
        self._path = path
        about = json.loads(json.dumps({"plan": asdict(plan), "model": model}))
        self.passes: list[Pass] = []
        try:
            lines = path.read_text().splitlines() if path.exists() else []
            if lines and _decoded(lines[0]) != about:
                raise StartupError(f"--resume {path}: holds another measurement: {lines[0]}")
            found = [_pass(data) for line in lines[1:] if (data := _decoded(line)) is not None]
            sizes = Counter((p.concurrency, p.run) for p in found)
            self.passes = [p for p in found if sizes[p.concurrency, p.run] == len(plan.modes)]
            path.write_text("".join(json.dumps(item) + "\n" for item in (about, *map(asdict, self.passes))))
        except OSError as error:
            raise StartupError(f"--resume {path}: {error.strerror}") from None

    def append(self, measured: Pass) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(measured)) + "\n")


def _decoded(line: str) -> Any:
    """None for a line that was not written to its end."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _pass(data: dict[str, Any]) -> Pass:
    requests = tuple(_request(request) for request in data["requests"])
    failures = tuple(Failure(**failure) for failure in data["failures"])
    return Pass(data["mode"], data["concurrency"], data["run"], requests, failures)


def _request(data: dict[str, Any]) -> Request:
    return Request(
        **data
        | {
            "arrivals": tuple((time, count) for time, count in data["arrivals"]),
            "token_ids": tuple(data["token_ids"]),
            "accepted_per_position": tuple(data["accepted_per_position"]),
            "timings": tuple(StepTiming(**timing) for timing in data["timings"]),
        }
    )
