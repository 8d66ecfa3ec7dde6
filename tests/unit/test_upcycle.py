"""Sparse upcycling: the mixture's logits are the dense model's; its files are those of a published Mixtral."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralForCausalLM
from typer.testing import CliRunner, Result

from tandem.checkpoints import upcycle as module
from tandem.checkpoints.upcycle import Upcycling, is_upcycled, upcycle
from tandem.cli.main import app
from tandem.errors import StartupError

EXPERTS = 8


def write_llama(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """A random Llama with a tokenizer's files beside it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "initializer_range": 0.2,
            "eos_token_id": 5,
            **changes,
        }
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return model


def run(source: Path, output: Path, **wanted: int) -> None:
    upcycle(source, output, Upcycling(**{"experts": EXPERTS, **wanted}), lambda what, done, total: None)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(96).reshape(2, 48)).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("experts_per_token", [1, 2, 3])
def test_logits_are_the_dense_models(tmp_path: Path, tied: bool, experts_per_token: int) -> None:
    """transformers loads the files without a missing or unexpected tensor; equal up to the router's rounding."""
    dense = write_llama(tmp_path / "dense", tie_word_embeddings=tied)
    run(tmp_path / "dense", tmp_path / "mixture", experts_per_token=experts_per_token)
    mixture, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "mixture", dtype=torch.float32, output_loading_info=True
    )
    assert isinstance(mixture, MixtralForCausalLM)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = logits(dense)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits(mixture), expected, rtol=1e-4, atol=1e-4)


def test_the_router_sends_tokens_to_all_experts(tmp_path: Path) -> None:
    """A router that always chose the same ones would show nothing."""
    write_llama(tmp_path / "dense")
    run(tmp_path / "dense", tmp_path / "mixture")
    mixture = MixtralForCausalLM.from_pretrained(tmp_path / "mixture", dtype=torch.float32)
    with torch.no_grad():
        routers = mixture(torch.arange(96)[None], output_router_logits=True).router_logits
    chosen = torch.cat([layer.topk(2).indices for layer in routers]).flatten()
    assert torch.bincount(chosen, minlength=EXPERTS).min() > 0


def test_weights_are_copies_in_their_own_dtype_under_published_names(tmp_path: Path) -> None:
    dense = write_llama(tmp_path / "dense", torch.bfloat16).state_dict()
    run(tmp_path / "dense", tmp_path / "mixture")
    mixture = tensors_of(tmp_path / "mixture")
    assert {t.dtype for t in mixture.values()} == {torch.bfloat16}
    for name, weight in mixture.items():
        prefix, _, rest = name.partition(".block_sparse_moe.experts.")
        if rest:
            part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}[rest.split(".")[1]]
            assert torch.equal(weight, dense[f"{prefix}.mlp.{part}.weight"])
        elif not name.endswith("block_sparse_moe.gate.weight"):
            assert torch.equal(weight, dense[name])
    assert mixture["model.layers.2.block_sparse_moe.gate.weight"].shape == (EXPERTS, 64)
    assert len(mixture) == len(dense) + 3 * (3 * (EXPERTS - 1) + 1)


def test_shards_are_small_indexed_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD_BYTES", 100_000)
    write_llama(tmp_path / "dense")
    for name in ("a", "b"):
        run(tmp_path / "dense", tmp_path / name)
    run(tmp_path / "dense", tmp_path / "c", seed=1)
    files = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(tmp_path / "a").values())
    same = [(tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files]
    assert all(same)
    routers = [tensors_of(tmp_path / name)["model.layers.0.block_sparse_moe.gate.weight"] for name in ("a", "c")]
    assert not torch.equal(*routers)


def test_the_tokenizer_and_the_ends_of_a_sequence_come_along(tmp_path: Path) -> None:
    write_llama(tmp_path / "dense")
    run(tmp_path / "dense", tmp_path / "mixture")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "mixture" / name).read_bytes() == (tmp_path / "dense" / name).read_bytes()
    assert json.loads((tmp_path / "mixture" / "config.json").read_text())["eos_token_id"] == 5


def test_what_the_dense_config_leaves_out_keeps_llamas_meaning(tmp_path: Path) -> None:
    """Mixtral has other defaults, of the rotary base for one."""
    write_llama(tmp_path / "dense", head_dim=16)
    path = tmp_path / "dense" / "config.json"
    config = json.loads(path.read_text())
    left_out = ("rope_parameters", "rms_norm_eps", "head_dim", "max_position_embeddings", "tie_word_embeddings")
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in left_out}))
    run(tmp_path / "dense", tmp_path / "mixture")
    dense, mixture = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("dense", "mixture")
    )
    torch.testing.assert_close(logits(mixture), logits(dense), rtol=1e-4, atol=1e-4)
    assert mixture.config.max_position_embeddings == dense.config.max_position_embeddings


BAD: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "one expert": ({}, {"experts": 1}, "at least 2 experts, not 1"),
    "too many per token": ({}, {"experts_per_token": 9}, r"experts per token must be in \[1, 8\], is 9"),
    "biases": ({"mlp_bias": True}, {}, r"config\.json: mlp_bias True cannot be upcycled"),
    "architecture": (
        {"architectures": ["Qwen3ForCausalLM"]},
        {},
        r"config\.json: architectures \['Qwen3ForCausalLM'\]",
    ),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config"),
    "shape": (
        {"intermediate_size": 96},
        {},
        r"mlp\.gate_proj\.weight has shape \[80, 64\], config.json means \[96, 64\]",
    ),
    "missing": ({"num_hidden_layers": 4}, {}, r"tensor model\.layers\.3\.\S+ is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_upcycled_is_named_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    changes, wanted, says = BAD[case]
    write_llama(tmp_path / "dense")
    path = tmp_path / "dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(StartupError, match=says):
        run(tmp_path / "dense", tmp_path / "mixture", **wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_folder_with_other_things_is_never_overwritten(tmp_path: Path) -> None:
    write_llama(tmp_path / "dense")
    with pytest.raises(StartupError, match="is not an upcycled model"):
        run(tmp_path / "dense", tmp_path / "dense")
    run(tmp_path / "dense", tmp_path / "mixture")
    assert is_upcycled(tmp_path / "mixture", Upcycling(EXPERTS))
    with pytest.raises(StartupError, match="num_local_experts 8, not 4"):
        is_upcycled(tmp_path / "mixture", Upcycling(4))


def prepare(*options: str) -> Result:
    return CliRunner().invoke(app, ["models", "prepare", *options])


def test_the_command_makes_it_once_beside_its_target(tmp_path: Path) -> None:
    write_llama(tmp_path / "dense")
    options = ("--upcycle-experts", "4", "--experts-per-token", "1", "--target", str(tmp_path / "dense"))
    first = prepare(*options)
    assert first.exit_code == 0, first.output
    assert is_upcycled(tmp_path / "dense-4x", Upcycling(4, 1))
    again = prepare(*options)
    assert again.exit_code == 0
    assert "already prepared" in again.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--target", "x"), "--target is for --upcycle-experts"),
        (("--upcycle-experts", "4", "--gguf", "x.gguf"), "--gguf makes a dense target"),
        (("--upcycle-experts", "4", "--target", "nowhere"), "nowhere/config.json: No such file"),
    ],
)
def test_what_does_not_go_together_is_exit_2(options: tuple[str, ...], says: str) -> None:
    result = prepare(*options)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
