"""Features: the taps of committed tokens after the draft model's fc and hidden_norm, kept beside the KV.

They are kept so that a drafter that connects late, or comes back, can be sent the context of every live sequence, and
so that a prefix hit brings its features along. Shipping them instead of raw taps cuts the bytes by the number of taps.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from tandem.checkpoints.draft_config import DraftConfig
from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError
from tandem.kernels.kv_compaction import kv_compaction
from tandem.kernels.rms_norm import rms_norm
from tandem.layers.linear import Linear
from verifier_service.models.target_config import TargetConfig
from verifier_service.models.target_model import Features, TapProjection


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
        make: Callable[[torch.Tensor, torch.Tensor, float], TapProjection] = projection,
    ):
        """make: projection, or what does the same on the native path."""
        self.config = DraftConfig.load(draft_folder)
        self._check(draft_folder, target)
        folder = CheckpointFolder(draft_folder)
        hidden, taps = self.config.hidden_size, len(self.config.target_layer_ids)
        weight = folder.tensor("fc.weight", (hidden, taps * target.hidden_size), dtype).to(device)
        norm = folder.tensor("hidden_norm.weight", (hidden,), dtype).to(device)
        self.apply = make(weight, norm, self.config.rms_norm_eps)

    def __call__(self, taps: torch.Tensor) -> torch.Tensor:
        """[rows, taps * target hidden] to [rows, hidden]; not on the native path."""
        assert callable(self.apply)
        return self.apply(taps)

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
    """Features by KV slot. Steps write those of all their rows, as they do keys and values; what a walk accepted moves
    to its place with those. Without a projection there are none."""

    def __init__(self, slots: int, projection: FeatureProjection | None, dtype: torch.dtype, device: torch.device):
        hidden = projection.config.hidden_size if projection else 0
        self._pool = torch.zeros(slots, hidden, dtype=dtype, device=device)
        layers = projection.config.target_layer_ids if projection else ()
        self.features = Features(layers, projection.apply, self._pool) if projection else None
        """What steps need of this; None without a projection."""

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy features between slots [moves], on the device: read all, then write all."""
        kv_compaction(self._pool[None], sources, targets)

    def read(self, slots: torch.Tensor) -> bytes:
        """The rows' bytes, little-endian, row-major."""
        rows = self._pool.index_select(0, slots).cpu()
        return rows.view(torch.uint8).numpy().tobytes()
