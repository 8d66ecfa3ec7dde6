"""A training run's checkpoint: everything that a run needs to be taken up exactly where it was left."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from tandem.errors import StartupError

_NAME = "checkpoint.pt"


@dataclass
class Progress:
    """Where a run stands. Everything a step depends on is here, in the weights or in the configuration."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that are done."""
    shards: list[str] = field(default_factory=list)
    """Shards of the epoch: data that is added meanwhile enters with the next one."""
    anchors: int = 0
    """Trained on so far."""
    seconds: float = 0.0
    """Spent training so far, evaluation included."""


@dataclass
class Checkpoint:
    """A run between two steps."""

    progress: Progress
    network: dict[str, torch.Tensor]
    average: dict[str, torch.Tensor]
    """Moving average of the network's tensors."""
    optimizers: dict[str, dict[str, Any]]
    """State of each, by name."""
    tokens: list[int] | None
    """Tokens of the reduced head, chosen when the run began."""
    tap_scale: torch.Tensor
    """[taps], measured when the run began."""
    draft: dict[str, Any]
    """The draft model's config.json."""


def write_checkpoint(run: Path, checkpoint: Checkpoint) -> None:
    """Into the run's folder; the old one stays until the new one is complete."""
    unfinished = run / f"{_NAME}.part"
    torch.save({**vars(checkpoint), "progress": asdict(checkpoint.progress)}, unfinished)
    unfinished.rename(run / _NAME)


def read_checkpoint(run: Path, draft: dict[str, Any]) -> Checkpoint | None:
    """None if there is none; StartupError if it is of a draft model with another config.json."""
    path = run / _NAME
    if not path.is_file():
        return None
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if saved.keys() != {part.name for part in fields(Checkpoint)}:
        raise StartupError(f"{path} is of another version's form; remove it to start over")
    if saved["draft"] != draft:
        keys = [key for key in draft | saved["draft"] if saved["draft"].get(key) != draft.get(key)]
        raise StartupError(f"draft: {path} was trained with another {', '.join(keys)}; remove it to start over")
    return Checkpoint(**{**saved, "progress": Progress(**saved["progress"])})
