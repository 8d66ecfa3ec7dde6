"""What a draft model learns from: the target's hidden states at every token of the training data.

Per token: the taps (residual stream after each of the draft model's tapped layers) and the final hidden state, all in
bf16, one after another. A conversation of n tokens has n - 1 rows: nothing follows its last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_training.conversations import Conversation
from tandem.errors import StartupError

SUFFIX = ".taps"


@dataclass(frozen=True)
class TapShape:
    """Width of a row."""

    taps: int
    hidden_size: int

    @property
    def width(self) -> int:
        """Values per token: the taps, then the final hidden state."""
        return (self.taps + 1) * self.hidden_size


class TapFile:
    """Rows of one shard, mapped from disk."""

    def __init__(self, path: Path, conversations: Sequence[Conversation], shape: TapShape):
        """StartupError if the file does not hold rows of this shape for these conversations."""
        self._starts = [0]
        for conversation in conversations:
            self._starts.append(self._starts[-1] + len(conversation.ids) - 1)
        expected, found = self._starts[-1] * shape.width * 2, path.stat().st_size
        if found != expected:
            raise StartupError(
                f"{path}: has {found} bytes, not {expected}: written for another target or other "
                "draft.target_layer_ids; remove it to have it computed again"
            )
        self._rows = torch.from_file(
            str(path), shared=False, size=self._starts[-1] * shape.width, dtype=torch.bfloat16
        ).view(-1, shape.width)

    def rows(self, index: int) -> torch.Tensor:
        """[tokens - 1, width] bf16 of the shard's conversation `index`."""
        return self._rows[self._starts[index] : self._starts[index + 1]]


class TapWriter:
    """Appends rows to a file that takes its name when it is complete."""

    def __init__(self, path: Path):
        self._path = path
        self._unfinished = path.with_name(path.name + ".part")
        self._file = self._unfinished.open("wb")

    def append(self, rows: torch.Tensor) -> None:
        """rows: [tokens - 1, width]."""
        self._file.write(rows.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())

    def close(self) -> None:
        self._file.close()
        self._unfinished.rename(self._path)
