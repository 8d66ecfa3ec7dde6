"""A run's curve: acceptance length on held-out answers as training goes on, one JSON line per measurement."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

_NAME = "progress.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """Acceptance length on held-out conversations."""

    step: int
    seconds: float
    loss: float
    """Mean training loss since the last evaluation; 0 before the first step."""
    block: float
    tree: float
    """Trees of 32 nodes."""
    block_per_depth: list[float]


def read_curve(run: Path) -> list[Evaluation]:
    """All evaluations of a run so far, in order."""
    path = run / _NAME
    return [Evaluation(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def add_to_curve(run: Path, evaluation: Evaluation) -> None:
    """Append one."""
    with (run / _NAME).open("a") as lines:
        lines.write(json.dumps(asdict(evaluation)) + "\n")
