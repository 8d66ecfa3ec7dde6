"""The target as a run loads it: what writes the data and the held-out answers."""

from pathlib import Path

import torch

from draft_training.config import TrainConfig
from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError
from verifier_service.models.architectures import read_config
from verifier_service.models.loading import load_served_model
from verifier_service.models.target_model import TargetModel


def load_target(config: TrainConfig, device: torch.device) -> TargetModel:
    """As the verifier would, of `data.target` where that is set. StartupError as writing_folder's and load_model's."""
    folder, dtype = CheckpointFolder(writing_folder(config)), getattr(torch, config.dtype)
    return load_served_model(folder, dtype, device, config.cpu_kernels, key="cpu_kernels")


def writing_folder(config: TrainConfig) -> Path:
    """The folder of the target that writes. StartupError if it cannot be the same network as `target`."""
    folder = config.data.target or config.target
    ours, other = (read_config(CheckpointFolder(f)) for f in (config.target, folder))
    for key in ("vocab_size", "hidden_size", "layers"):
        expected, found = getattr(ours, key), getattr(other, key)
        if found != expected:
            raise StartupError(f"data.target: {folder} has {key} {found}, target has {expected}")
    return folder
