"""Features: the taps of committed tokens after the draft model's fc and hidden_norm, kept beside the KV.

They are kept so that a drafter that connects late, or comes back, can be sent the context of every live sequence, and
so that a prefix hit brings its features along. Shipping them instead of raw taps cuts the bytes by the number of taps.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tandem.checkpoints.draft_config import DraftConfig
from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError
from tandem.kernels.kv_compaction import kv_compaction
from tandem.kernels.rms_norm import rms_norm
from tandem.layers.linear import Linear
from verifier_service.models.target_config import TargetConfig


def projection(weight: torch.Tensor, norm: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """taps [rows, in] to RMSNorm(taps weight^T) [rows, out]. weight: [out, in], norm: [out]."""
    fc = Linear(weight)
    return lambda taps: rms_norm(fc(taps), norm, eps)


class FeatureProjection:
    """The draft model's first step, run by the verifier: hidden_norm(fc(taps)). DFlash, arXiv 2602.06036."""

    def __init__(
        self,
        draft_folder: Path,
        target: TargetConfig,
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[[torch.Tensor, torch.Tensor, float], Callable[[torch.Tensor], torch.Tensor]] = projection,
    ):
        """make: projection, or what does the same elsewhere."""
        self.config = DraftConfig.load(draft_folder)
        self._check(draft_folder, target)
        folder = CheckpointFolder(draft_folder)
        hidden, taps = self.config.hidden_size, len(self.config.target_layer_ids)
        weight = folder.tensor("fc.weight", (hidden, taps * target.hidden_size), dtype).to(device)
        norm = folder.tensor("hidden_norm.weight", (hidden,), dtype).to(device)
        self._project = make(weight, norm, self.config.rms_norm_eps)
        self.inputs = weight.shape[1]
        """Taps * target hidden."""

    def __call__(self, taps: torch.Tensor) -> torch.Tensor:
        """[rows, taps * target hidden] to [rows, hidden]."""
        return self._project(taps)

    def _check(self, folder: Path, target: TargetConfig) -> None:
        c = self.config
        where = folder / "config.json"
        if c.vocab_size != target.vocab_size:
            raise StartupError(f"{where}: vocab_size is {c.vocab_size}, the target's is {target.vocab_size}")
        if c.hidden_size != target.hidden_size:
            raise StartupError(f"{where}: hidden_size is {c.hidden_size}, the target's is {target.hidden_size}")
        beyond = [i for i in c.target_layer_ids if i >= target.layers]
        if beyond:
            raise StartupError(
                f"{where}: target_layer_ids: {beyond[0]} is not below the target's {target.layers} layers"
            )


class FeaturePool:
    """Features by KV slot. Without a projection it keeps nothing.

    Taps wait for their projection until they are many or a drafter is to be sent some: while nobody reads them, as when
    speculation is off, one matrix product per MAX_WAITING rows takes the place of one per step.
    """

    MAX_WAITING = 512

    def __init__(self, slots: int, projection: FeatureProjection | None, dtype: torch.dtype, device: torch.device):
        self._projection = projection
        hidden, inputs = (projection.config.hidden_size, projection.inputs) if projection else (0, 0)
        self._pool = torch.zeros(slots, hidden, dtype=dtype, device=device)
        self._taps = torch.empty(self.MAX_WAITING, inputs, dtype=dtype, device=device)
        self._slots = torch.empty(self.MAX_WAITING, dtype=torch.int64, device=device)
        self._waiting = 0
        """Rows of the two."""

    def write(self, slots: torch.Tensor, taps: torch.Tensor) -> None:
        """slots [rows] int64, all different; taps [rows, taps * target hidden]. Both are copied."""
        if self._waiting + len(slots) > self.MAX_WAITING:
            self.flush()
        if len(slots) > self.MAX_WAITING:
            self.project(slots, taps)
            return
        rows = slice(self._waiting, self._waiting + len(slots))
        self._slots[rows] = slots
        self._taps[rows] = taps
        self._waiting = rows.stop

    def project(self, slots: torch.Tensor, taps: torch.Tensor) -> None:
        """The same at once, in fixed shapes. What waits must not: flush() comes before."""
        assert self._projection
        self._pool.index_copy_(0, slots, self._projection(taps))

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy features between slots [moves], on the device: read all, then write all."""
        kv_compaction(self._pool[None], sources, targets)

    def read(self, slots: torch.Tensor) -> bytes:
        """The rows' bytes, little-endian, row-major."""
        self.flush()
        rows = self._pool.index_select(0, slots).cpu()
        return rows.view(torch.uint8).numpy().tobytes()

    def flush(self) -> None:
        """Project what waits."""
        count, self._waiting = self._waiting, 0
        if count:
            rows = _last_of_each(self._slots[:count])
            self.project(*(t[:count] if rows is None else t[rows] for t in (self._slots, self._taps)))


def _last_of_each(slots: torch.Tensor) -> torch.Tensor | None:
    """Of a slot that was given to another sequence meanwhile only what was written to it last counts: the rows that do
    count, or None if all do."""
    backwards = slots.cpu().numpy()[::-1]
    _, found = np.unique(backwards, return_index=True)
    return None if len(found) == len(slots) else torch.from_numpy(len(slots) - 1 - found).to(slots.device)
