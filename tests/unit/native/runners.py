"""Model runners on the CPU's native path."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandem.checkpoints.folder import CheckpointFolder
from tests.unit.verifier.steps import BLOCK_TOKENS, CPU, KV_BLOCKS, RecordingModel
from tests.unit.verifier.test_tree_verify import Target
from verifier_service.model_runner import ModelRunner
from verifier_service.models.loading import load_cpu_model
from verifier_service.models.native_decoder import NativeDecoder


def native_model(folder: Path, threads: int = 2) -> NativeDecoder:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = load_cpu_model(CheckpointFolder(folder), torch.bfloat16, "native")
    finally:
        torch.set_num_threads(before)
    assert isinstance(model, NativeDecoder)
    return model


def native_target(folder: Path, threads: int = 2) -> Target:
    model = RecordingModel(native_model(folder, threads))
    return Target(ModelRunner(model, None, KV_BLOCKS, BLOCK_TOKENS, CPU), model)


def round_weights(folder: Path) -> None:
    """To bf16, so that fp32 arithmetic on them is the oracle of bf16 paths."""
    file = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
