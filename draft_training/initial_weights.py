"""What a draft model's weights are before the first step: another draft model's, or the target's last layers."""

from pathlib import Path

import torch

from draft_training.network import DraftNetwork
from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError


def load_draft_model(network: DraftNetwork, folder: Path) -> None:
    """Take over a DFlash folder's weights; StartupError for what is missing or has another shape."""
    checkpoint = CheckpointFolder(folder)
    state = {
        name: checkpoint.tensor(name, tuple(tensor.shape), torch.float32)
        for name, tensor in network.state_dict().items()
        if name in checkpoint
    }
    try:
        network.load_published(state)
    except KeyError as error:
        raise StartupError(f"training.initial_model: {folder}: {error.args[0]}") from None


def copy_last_layers(network: DraftNetwork, target: CheckpointFolder, layers: int) -> None:
    """Draft layer i of n begins as layer `layers` - n + i of the target, as far as that has tensors of the same name
    and shape; the others keep their random start."""
    first = layers - network.config.num_hidden_layers
    same_mlp = network.config.intermediate_size == target.text_config["intermediate_size"]
    for name, tensor in network.state_dict().items():
        if not name.startswith("layers.") or first < 0 or (".mlp." in name and not same_mlp):
            continue
        number, _, rest = name.removeprefix("layers.").partition(".")
        source = f"{target.text_prefix}model.layers.{first + int(number)}.{rest}"
        if source in target:
            tensor.copy_(target.tensor(source, tuple(tensor.shape), torch.float32))
