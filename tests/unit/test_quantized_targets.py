"""Whole targets in their published quantised form: logits are those of the dequantised weights.

Oracle: transformers, whose weights are overwritten with what the quantised ones stand for, in fp32. Tolerance 1e-4 for
logits of size 10: sums in another order.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tandem.checkpoints.folder import CheckpointFolder
from tests.fakes.quantized_folders import to_fp8, to_int4
from tests.fakes.random_targets import random_architecture
from tests.fakes.thread_ranks import run_ranks
from verifier_service.models.loading import load_model
from verifier_service.parallel.ranks import Parallel
from verifier_service.step import SegmentRows
from verifier_service.step_executor import StepExecutor

CPU = torch.device("cpu")
BLOCK_TOKENS = 16

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_FP8 = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight")
TOKENS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def kimi_int4(folder: Path, reference: Path) -> PreTrainedModel:
    """Routed experts are INT4, all else is not, as in Kimi K2.5."""
    model = random_architecture(folder, "kimi")
    to_int4(folder, reference, lambda name: bool(_EXPERT.search(name)))
    return model


def deepseek_fp8(folder: Path, reference: Path) -> PreTrainedModel:
    """Every projection is FP8, among them kv_b_proj and partial blocks, as in DeepSeek-V3."""
    model = random_architecture(folder, "deepseek-v3", hidden_size=192, intermediate_size=288)
    to_fp8(folder, reference, lambda name: bool(_FP8.fullmatch(name)))
    return model


def adopt(model: PreTrainedModel, folder: Path) -> None:
    """Overwrite transformers' weights, whose experts are fused, with those of a folder in published form."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for published, tensor in load_file(folder / "model.safetensors").items():
            name = published.removeprefix("language_model.")
            if found := _EXPERT.fullmatch(name):
                experts, index = model.model.layers[int(found[1])].mlp.experts, int(found[2])
                gate, up = experts.gate_up_proj[index].chunk(2)
                {"gate": gate, "up": up, "down": experts.down_proj[index]}[found[3]].copy_(tensor)
            elif name in parameters:
                parameters[name].copy_(tensor)


def logits_over_ranks(folder: Path, size: int, split_attention: bool, cut_experts: bool) -> torch.Tensor:
    """Rank 0's logits of all TOKENS in one step."""
    segment = SegmentRows(0, 0, TOKENS, [], blocks=[3, 1, 2])

    def work(parallel: Parallel) -> torch.Tensor:
        model = load_model(CheckpointFolder(folder), torch.float32, CPU, parallel)
        executor = StepExecutor(model, 4, BLOCK_TOKENS, CPU)
        hidden = executor.forward([segment]).hidden
        if parallel.ranks.rank and not model.head_is_split:
            return hidden
        return executor.logits(hidden, list(range(len(TOKENS))))

    return run_ranks(size, split_attention, cut_experts, work)[0]


@pytest.mark.parametrize("make", [kimi_int4, deepseek_fp8])
def test_logits_are_those_of_the_dequantised_weights(
    make: Callable[[Path, Path], PreTrainedModel], tmp_path: Path
) -> None:
    """On one rank, on two with all that can be split, on eight with whole experts."""
    folder, prompt = tmp_path / "target", torch.tensor([TOKENS])
    model = make(folder, tmp_path / "reference")
    with torch.inference_mode():
        original = model(prompt).logits[0]
        adopt(model, tmp_path / "reference")
        expected = model(prompt).logits[0]
    assert (original - expected).abs().max() > 1e-2, "quantisation must matter, or nothing is tested"
    for size, split_attention, cut_experts in ((1, False, False), (2, True, True), (2, False, False), (8, True, False)):
        logits = logits_over_ranks(folder, size, split_attention, cut_experts)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
