"""What a checkpoint folder may hold: everything else is refused at start, by file and key or tensor; a rank reads what
it uses and no more."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.checkpoints.folder import CheckpointFolder
from tandem.checkpoints.shard import WHOLE, Shard
from tandem.errors import StartupError
from tests.fakes.random_targets import random_architecture
from verifier_service.models.architectures import read_config
from verifier_service.models.loading import Placement, load_model
from verifier_service.models.target_config import GroupedAttention, LatentAttention
from verifier_service.parallel.ranks import Parallel

CPU = torch.device("cpu")
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
DEEPSEEK = {**QWEN3, "architectures": ["DeepseekV3ForCausalLM"]}
MIXTRAL = {**QWEN3, "architectures": ["MixtralForCausalLM"]}


def config_folder(folder: Path, config: dict[str, Any]) -> CheckpointFolder:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    return CheckpointFolder(folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {**QWEN3, "architectures": ["GptOssForCausalLM"]},
            "architectures: .*GptOss.* is not supported; supported: L",
        ),
        ({**QWEN3, "architectures": None}, "architectures: None is not supported"),
        ({**QWEN3, "hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; supported: 'silu'"),
        ({**QWEN3, "attention_bias": True}, "attention_bias: True is not supported"),
        ({**QWEN3, "use_sliding_window": True}, "use_sliding_window: True is not supported"),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types: 'sliding_attention' is not"),
        ({**QWEN3, "hidden_size": None}, "hidden_size: missing"),
        ({**QWEN3, "num_hidden_layers": "4"}, "num_hidden_layers: '4' is not supported; supported: a whole number"),
        ({**QWEN3, "num_key_value_heads": 3}, "num_key_value_heads: 3 is not supported; supported: a divisor of .* 8"),
        ({**QWEN3, "num_experts": 4}, "num_experts_per_tok: 8 is not supported; supported: at most the 4 experts"),
        ({**QWEN3, "rope_scaling": {"type": "dynamic"}}, "rope_scaling.rope_type: 'dynamic' is not supported"),
        ({**QWEN3, "rope_scaling": {"type": "yarn"}}, "rope_scaling.factor: missing"),
        ({**MIXTRAL, "sliding_window": 4096}, "sliding_window: 4096 is not supported"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported; supported: 'sigmoid'"),
        ({**DEEPSEEK, "topk_method": "greedy"}, "topk_method: 'greedy' is not supported"),
        ({**DEEPSEEK, "n_group": 7}, "n_group: 7 is not supported; supported: a divisor of the 256 experts"),
        ({**DEEPSEEK, "topk_group": 9}, "topk_group: 9 is not supported; supported: at most n_group, 8"),
        (
            {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {**DEEPSEEK, "hidden_act": "relu"}},
            "text_config.hidden_act: 'relu' is not supported",
        ),
        ({**QWEN3, "architectures": ["KimiK25ForConditionalGeneration"]}, "text_config: missing"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    folder = config_folder(tmp_path, config)
    with pytest.raises(StartupError, match=f"config.json: {said}"):
        read_config(folder)


def test_keys_a_file_lacks_have_transformers_defaults(tmp_path: Path) -> None:
    qwen3 = read_config(config_folder(tmp_path, QWEN3))
    assert qwen3.attention == GroupedAttention(kv_heads=4, head_dim=16, qk_norm=True)
    assert qwen3.mixture
    assert (qwen3.mixture.experts, qwen3.mixture.experts_per_token, qwen3.mixture.expert_size) == (128, 8, 768)
    assert not qwen3.mixture.routing.normalise
    deepseek = read_config(config_folder(tmp_path, DEEPSEEK))
    assert isinstance(deepseek.attention, LatentAttention)
    assert (deepseek.attention.q_rank, deepseek.attention.kv_rank, deepseek.attention.rope_dim) == (1536, 512, 64)
    assert deepseek.mixture
    assert sorted(deepseek.mixture.layers) == [3]
    assert (deepseek.mixture.routing.groups, deepseek.mixture.routing.kept_groups) == (8, 4)
    assert read_config(config_folder(tmp_path, {**DEEPSEEK, "q_lora_rank": None})).attention.q_rank is None  # type: ignore[union-attr]
    assert read_config(config_folder(tmp_path, MIXTRAL)).rope.theta == 1e6


def test_the_softmax_scale_is_that_of_the_published_models(tmp_path: Path) -> None:
    """0.144680 for Kimi K2, 0.135234 for DeepSeek-V3: yarn's factor squared, over sqrt(192)."""
    yarn = {"type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    for factor, scale in ((64, 0.144680), (40, 0.135234)):
        config = read_config(config_folder(tmp_path, {**DEEPSEEK, "rope_scaling": {**yarn, "factor": factor}}))
        assert isinstance(config.attention, LatentAttention)
        assert config.attention.scale == pytest.approx(scale, abs=1e-6)


Change = Callable[[dict[str, torch.Tensor]], object]
KEY = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(KEY), f"tensor {KEY} is missing"),
        (lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"), "e_score_correction_bias is missing"),
        (lambda t: t.update({KEY: torch.zeros(3, 128)}), rf"tensor {KEY} has shape \[3, 128\], .* \[64, 128\]"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected tensor extra"),
        (lambda t: t.update({KEY.replace("5", "16"): torch.zeros(1)}), "unexpected tensor .*experts.16.up_proj"),
        (lambda t: t.update({KEY.replace("layers.2", "layers.3"): torch.zeros(1)}), "unexpected tensor .*layers.3"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, change: Change, said: str) -> None:
    random_architecture(tmp_path, "deepseek-v3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(StartupError, match=said):
        load_model(CheckpointFolder(tmp_path), torch.float32, CPU)


def test_layers_for_further_tokens_are_left_unread(tmp_path: Path) -> None:
    random_architecture(tmp_path, "deepseek-v3")
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_nextn_predict_layers": 1}))
    save_file({**load_file(file), "model.layers.3.eh_proj.weight": torch.zeros(1)}, file)
    load_model(CheckpointFolder(tmp_path), torch.float32, CPU)


class _Apart:
    """One of several ranks that loads and never runs."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    gather_columns = all_reduce


def apart(rank: int, size: int, split: bool = False, cut: bool = False) -> Parallel:
    shard = Shard(rank, size)
    return Parallel(_Apart(rank, size), shard if split else WHOLE, shard, cut)


def bytes_read(folder: Path, parallel: Parallel, placement: Placement | None = None) -> dict[str, int]:
    read: dict[str, int] = {}

    def note(name: str, size: int) -> None:
        read[name] = read.get(name, 0) + size

    load_model(CheckpointFolder(folder), torch.float32, CPU, parallel, placement, note)
    return read


def test_a_rank_reads_its_part(tmp_path: Path) -> None:
    """Whole experts: an eighth of them. Cut: an eighth of each. Attention and head: all or an eighth, or none at all
    where rank 0 alone computes logits."""
    random_architecture(tmp_path, "qwen3-moe", num_key_value_heads=8)
    expert = 3 * 64 * 128 * 4
    whole = bytes_read(tmp_path, apart(3, 8))
    experts = {name: size for name, size in whole.items() if ".experts." in name}
    assert {name.split(".")[5] for name in experts} == {"6", "7"}
    assert sum(experts.values()) == 2 * 2 * expert
    assert "lm_head.weight" not in whole
    assert whole["model.layers.0.self_attn.q_proj.weight"] == 8 * 32 * 128 * 4
    cut = bytes_read(tmp_path, apart(3, 8, split=True, cut=True))
    experts = {name: size for name, size in cut.items() if ".experts." in name}
    assert len({name.split(".")[5] for name in experts}) == 16
    assert sum(experts.values()) == 2 * 16 * expert / 8
    assert cut["lm_head.weight"] == 512 // 8 * 128 * 4
    assert cut["model.layers.0.self_attn.q_proj.weight"] == 32 * 128 * 4
    placed = bytes_read(tmp_path, apart(1, 2), {1: [[*range(2, 16)], [0, 1]]})
    assert {n.split(".")[5] for n in placed if "layers.1.mlp.experts." in n} == {"0", "1"}


@pytest.mark.parametrize(
    ("kind", "changes", "parallel", "placement", "said"),
    [
        ("qwen3", {"num_attention_heads": 6}, apart(0, 8, split=True), None, "num_attention_heads: 6 .* over 8 ranks"),
        ("qwen3", {"num_attention_heads": 9, "num_key_value_heads": 3}, apart(0, 9, True), None, "dimension 0.*over 9"),
        ("qwen3", {"vocab_size": 514}, apart(0, 4, split=True), None, "vocab_size: 514 cannot be split over 4 ranks"),
        ("qwen3-moe", {"num_experts": 12}, apart(0, 8), None, "experts: 12 cannot be split over 8 ranks"),
        ("qwen3-moe", {}, apart(0, 3, cut=True), None, r"dimension 0\): 64 cannot be split over 3 ranks"),
        ("deepseek-v3", {"n_shared_experts": 1}, apart(0, 3), {1: [[]] * 3, 2: [[]] * 3}, "placement .* layer 1: must"),
        ("qwen3-moe", {}, apart(0, 2), {1: [[*range(8)], [*range(7, 16)]]}, "placement of experts, layer 1: must give"),
        ("qwen3-moe", {}, apart(0, 2, cut=True), {1: [[], []]}, "when they are cut"),
    ],
    ids=["heads", "MLP", "vocabulary", "experts", "expert columns", "placement", "placed twice", "placed and cut"],
)
def test_what_cannot_be_split_is_refused_with_the_numbers(
    tmp_path: Path, kind: str, changes: dict[str, Any], parallel: Parallel, placement: Placement | None, said: str
) -> None:
    random_architecture(tmp_path, kind, **changes)
    with pytest.raises(StartupError, match=said):
        load_model(CheckpointFolder(tmp_path), torch.float32, CPU, parallel, placement)
