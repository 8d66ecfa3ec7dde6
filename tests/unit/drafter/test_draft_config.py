"""What of a draft model's config.json is read, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.draft_config import DFlash2Config, DraftConfig, DraftLayer
from tandem.errors import StartupError
from tests.fakes.draft_folders import dflash2_config, draft_config

# As published for Qwen3-8B (values of the public training template).
QWEN3_8B = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def load(folder: Path, config: dict[str, Any]) -> DraftConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return DraftConfig.load(folder)


def test_published_config(tmp_path: Path) -> None:
    """A published config.json loads unchanged, with every value where it belongs."""
    config = load(tmp_path, QWEN3_8B)
    assert (config.block_size, config.mask_token_id, config.vocab_size) == (16, 151669, 151936)
    assert (config.target_layer_ids, config.num_target_layers) == ((1, 9, 17, 25, 33), 36)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (4096, 12288, 5)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert (config.rms_norm_eps, config.rope.theta, config.max_position_embeddings) == (1e-6, 1e6, 40960)
    assert config.layers == (DraftLayer(causal=False, window=None),) * 5
    assert (config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping) == (1.0, 1.0, None)


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "ids"),
    # From the table of published draft models: Qwen3-8B, Qwen3-Coder-30B-A3B (with five taps), Qwen3.6-27B.
    [(36, 5, (1, 9, 17, 25, 33)), (48, 5, (1, 12, 23, 34, 45)), (64, 5, (1, 16, 31, 46, 61)), (31, 1, (15,))],
)
def test_default_taps(target_layers: int, draft_layers: int, ids: tuple[int, ...], tmp_path: Path) -> None:
    """Without target_layer_ids the taps are spread over the target as the published ones are."""
    changes = {"dflash_config": {"mask_token_id": 1}, "layer_types": ["full_attention"] * draft_layers}
    config = draft_config(num_target_layers=target_layers, num_hidden_layers=draft_layers, **changes)
    assert load(tmp_path, config).target_layer_ids == ids


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [(True, 9), (False, None), (True, 9)]),
        ({"is_causal": False}, [(False, 9), (False, None), (False, 9)]),
        ({"is_causal": True}, [(True, 9), (True, None), (True, 9)]),
        ({"is_causal": None}, [(True, 9), (False, None), (True, 9)]),
        ({"layer_types": ...}, [(False, None)] * 3),
        ({"layer_types": ..., "max_window_layers": 2}, [(False, None), (False, None), (True, 9)]),
        ({"layer_types": ..., "max_window_layers": 0, "is_causal": False}, [(False, 9)] * 3),
    ],
)
def test_windows_and_causality(changes: dict[str, Any], layers: list[tuple[bool, int | None]], tmp_path: Path) -> None:
    """is_causal holds for all layers; without it, sliding layers are causal and full ones are not."""
    sliding = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    config = draft_config(**{"sliding_window": 9, "use_sliding_window": True, **sliding, **changes})
    assert load(tmp_path, config).layers == tuple(DraftLayer(*layer) for layer in layers)


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"architectures": ["DSparkDraftModel"]}, "architectures", "DFlash2DraftModel"),
        ({"architectures": ...}, "architectures", "DFlashDraftModel"),
        ({"selector_rank": 4}, "selector_rank", "DFlash2"),
        ({"model_type": "llama"}, "model_type", "qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act", "silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "unknown key"),
        ({"dflash_config": {"mask_token_id": 1, "selector_top_k": 16}}, "dflash_config.selector_top_k", "DFlash2"),
        (
            {"dflash_config": {"mask_token_id": 1, "sample_from_anchor": 1}},
            "dflash_config.sample_from_anchor",
            "DSpark",
        ),
        ({"dflash_config": {"mask_token_id": 1, "projector_type": "domino"}}, "dflash_config.projector_type", "Domino"),
        ({"dflash_config": {"mask_token_id": 1, "use_swa": True}}, "dflash_config.use_swa", "unknown key"),
        ({"dflash_config": {"mask_token_id": 1, "hidden_size": 64}}, "dflash_config.hidden_size", "unknown key"),
        ({"dflash_config": [1]}, "dflash_config", "object"),
        ({"dflash_config": {}}, "mask_token_id", "missing"),
        ({"dflash_config": {"mask_token_id": 512}}, "mask_token_id", "below vocab_size 512"),
        ({"dflash_config": {"mask_token_id": "<|MASK|>"}}, "mask_token_id", "integer"),
        ({"dflash_config": {"mask_token_id": 1}, "num_target_layers": ...}, "target_layer_ids", "missing"),
        ({"num_target_layers": 7}, "target_layer_ids", "below num_target_layers 7"),
        ({"target_layer_ids": [], "dflash_config": {"mask_token_id": 1}}, "target_layer_ids", "list"),
        ({"block_size": ...}, "block_size", "missing"),
        ({"block_size": 1}, "block_size", "at least 2"),
        ({"hidden_size": True}, "hidden_size", "integer"),
        ({"head_dim": ...}, "head_dim", "missing"),
        ({"head_dim": 33}, "head_dim", "multiple of 2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "divide"),
        ({"rms_norm_eps": ...}, "rms_norm_eps", "missing"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps", "number"),
        ({"is_causal": "yes"}, "is_causal", "true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types", "num_hidden_layers 3"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types", "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "use_sliding_window", "must be true"),
        ({"use_sliding_window": True}, "sliding_window", "missing"),
        ({"rope_theta": ...}, "rope_theta", "missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type", "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "colour": 1}}, "rope_scaling.colour", "unknown key"),
    ],
)
def test_refusals_name_file_and_key(changes: dict[str, Any], key: str, says: str, tmp_path: Path) -> None:
    """What would not be honoured is refused in one line that names the file and the key and says what is wrong."""
    with pytest.raises(StartupError) as caught:
        load(tmp_path, draft_config(**changes))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: {key}: ")
    assert says in message
    assert "\n" not in message


# Values of a published DFlash2 config.json (Muse-Glimmer-30B).
MUSE_GLIMMER_30B = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "dflash_config": {
        "block_size": 16,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0,
        "mask_token_id": 201818,
        "output_multiplier": 0.196116,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 52,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 202048,
}


def test_published_dflash2_config(tmp_path: Path) -> None:
    """A published DFlash2 config.json loads unchanged, with every value where it belongs."""
    config = load(tmp_path, MUSE_GLIMMER_30B)
    assert config.dflash2 == DFlash2Config(2, 16, 256, 16)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 201818, (1, 13, 25, 37, 49))
    assert (config.output_multiplier, config.final_logit_softcapping) == (0.196116, 20.0)
    assert config.layers == (DraftLayer(causal=False, window=2048),) * 5
    assert load(tmp_path, QWEN3_8B).dflash2 is None


def test_dflash2_keys_at_the_top_level(tmp_path: Path) -> None:
    """As all of dflash_config's keys, they may stand at the top level, and dflash_config wins."""
    inner = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank"), ...)
    top = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 99}
    config = load(tmp_path, dflash2_config(inner, **top))
    assert config.dflash2 == DFlash2Config(3, 8, 5, 6)


@pytest.mark.parametrize(
    ("inner", "changes", "key", "says"),
    [
        *(({key: ...}, {}, key, "missing") for key in ("conv_kernel_size", "conv_group_size", "selector_rank")),
        ({"selector_top_k": ...}, {}, "selector_top_k", "missing"),
        ({"conv_kernel_size": 0}, {}, "conv_kernel_size", "at least 1"),
        ({"conv_group_size": 24}, {}, "conv_group_size", "divide hidden_size 64"),
        ({"selector_top_k": 513}, {}, "selector_top_k", "at most vocab_size 512"),
        ({}, {"draft_vocab_size": 5}, "selector_top_k", "at most draft_vocab_size 5"),
        ({"selector_temperature": 1.0}, {}, "dflash_config.selector_temperature", "unknown key"),
        ({}, {"selector_bias": True}, "selector_bias", "unknown key"),
        ({"projector_type": "domino"}, {}, "dflash_config.projector_type", "Domino"),
        ({}, {"architectures": ["DFlashDraftModel"]}, "dflash_config.conv_group_size", "DFlash2"),
    ],
)
def test_dflash2_refusals(inner: dict[str, Any], changes: dict[str, Any], key: str, says: str, tmp_path: Path) -> None:
    """As for DFlash: what would not be honoured is refused by name."""
    with pytest.raises(StartupError) as caught:
        load(tmp_path, dflash2_config(inner, **changes))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: {key}: ")
    assert says in message
