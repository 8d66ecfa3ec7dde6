"""Draft model folders that do not hold what their config.json means are refused before anything is drafted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.draft_weights import load_weights
from tandem.checkpoints.draft_config import DraftConfig
from tandem.errors import StartupError
from tests.fakes.draft_folders import (
    HIDDEN,
    dflash2_config,
    draft_config,
    draft_tensors,
    write_draft,
    write_target,
)
from tests.fakes.quantized_folders import int4_weight

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")


def refusal(folder: Path, change: Callable[[Tensors], object] = lambda t: None, **target_changes: object) -> str:
    config = draft_config()
    tensors = draft_tensors(config)
    change(tensors)
    draft = write_draft(folder / "draft", config, tensors)
    target = write_target(folder / "target", **target_changes)  # type: ignore[arg-type]
    with pytest.raises(StartupError) as caught:
        DraftModel.load(draft, target, torch.float32, torch.device("cpu"))
    return str(caught.value)


def test_missing_tensor(tmp_path: Path) -> None:
    message = refusal(tmp_path, lambda t: t.pop("layers.1.self_attn.k_norm.weight"))
    assert "layers.1.self_attn.k_norm.weight is missing" in message


def test_wrong_shape(tmp_path: Path) -> None:
    message = refusal(tmp_path, lambda t: t.update({"layers.2.mlp.up_proj.weight": torch.zeros(95, HIDDEN)}))
    assert "layers.2.mlp.up_proj.weight has shape [95, 64], config.json means [96, 64]" in message


@pytest.mark.parametrize(
    "name", ["embed_tokens.weight", "lm_head.weight", "d2t", "layers.0.self_attn.q_proj.bias", "layers.3.norm.weight"]
)
def test_extra_tensor(name: str, tmp_path: Path) -> None:
    """A tensor that would go unused means another network than the one that would be run."""
    assert f"unexpected tensor {name}" in refusal(tmp_path, lambda t: t.update({name: torch.zeros(1)}))


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [("vocab_size", 513, 512), ("hidden_size", 128, 64), ("num_hidden_layers", 11, 10)],
)
def test_target_of_another_shape(key: str, value: int, ours: int, tmp_path: Path) -> None:
    """A draft model of another target is refused with both values named."""
    message = refusal(tmp_path, **{key: value})
    assert str(ours) in message
    assert f"{key} {value}" in message
    assert "another target" in message


def test_embedding_that_is_not_the_vocabulary(tmp_path: Path) -> None:
    """config.json and tensors of the target must agree too."""
    (tmp_path / "target").mkdir()
    config = draft_config()
    draft = write_draft(tmp_path / "draft", config, draft_tensors(config))
    target = write_draft(
        tmp_path / "target",
        {"vocab_size": 512, "hidden_size": HIDDEN, "num_hidden_layers": 10},
        {"model.embed_tokens.weight": torch.zeros(511, HIDDEN)},
    )
    with pytest.raises(StartupError, match=r"model\.embed_tokens\.weight has shape \[511, 64\]"):
        DraftModel.load(draft, target, torch.float32, torch.device("cpu"))


def test_a_reduced_head_proposes_the_best_of_its_tokens(tmp_path: Path) -> None:
    """Oracle: the same model with its whole head, restricted to the tokens that `d2t` lists."""
    config = draft_config()
    tensors = draft_tensors(config)
    target = write_target(tmp_path / "target")
    whole = DraftModel.load(write_draft(tmp_path / "whole", config, tensors), target, torch.float32, CPU)
    tokens = torch.tensor(sorted({3, 7, 8, 20, 41, config["vocab_size"] - 1}))
    reduced_config = {**config, "draft_vocab_size": len(tokens)}
    d2t = {"d2t": tokens - torch.arange(len(tokens))}
    folder = write_draft(tmp_path / "reduced", reduced_config, {**tensors, **d2t})
    reduced = DraftModel.load(folder, target, torch.float32, CPU)
    features = torch.randn(9, config["hidden_size"], generator=torch.Generator().manual_seed(5))
    requests = []
    for model in (whole, reduced):
        kv = model.new_context()
        model.write_context([ContextRows(kv, 0, features)])
        requests.append(BlockRequest(kv, 9, 11, config["block_size"] - 1))
    among = whole.block_logits(requests[:1])[:, tokens]
    torch.testing.assert_close(reduced.block_logits(requests[1:]), among, rtol=1e-4, atol=1e-4)
    assert reduced.draft(requests[1:])[0].tokens == tokens[among.argmax(dim=-1)].tolist()


@pytest.mark.parametrize("tokens", [[3, 2, 9], [3, 3, 9], [-1, 2, 9], [1, 2, 4096]])
def test_a_broken_draft_vocabulary_is_refused(tmp_path: Path, tokens: list[int]) -> None:
    config = draft_config(draft_vocab_size=3)
    tensors = {**draft_tensors(config), "d2t": torch.tensor(tokens) - torch.arange(3)}
    folder = write_draft(tmp_path / "draft", config, tensors)
    with pytest.raises(StartupError, match="d2t"):
        DraftModel.load(folder, write_target(tmp_path / "target"), torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("layers.2.mlp_conv.base_kernel", "[2, 2, 64]"),
        ("layers.0.attention_conv.kernel_projection.weight", "[16, 64]"),
        ("candidate_selector.successor_codebook", "[512, 12]"),
        ("candidate_selector.hidden_projection.weight", "[12, 64]"),
    ],
)
def test_dflash2_tensors_are_checked(name: str, width: str, tmp_path: Path) -> None:
    """Each of DFlash2's tensors is missed by name, checked by shape, and refused in a DFlash folder."""
    config = dflash2_config()
    tensors = draft_tensors(config)
    target = write_target(tmp_path / "target")
    missing = {key: value for key, value in tensors.items() if key != name}
    for changed, says in ((missing, "is missing"), (tensors | {name: torch.zeros(3)}, f"config.json means {width}")):
        folder = write_draft(tmp_path / "draft", config, changed)
        with pytest.raises(StartupError) as caught:
            DraftModel.load(folder, target, torch.float32, CPU)
        assert name in str(caught.value)
        assert says in str(caught.value)
    folder = write_draft(tmp_path / "draft", draft_config(), draft_tensors(draft_config()) | {name: tensors[name]})
    with pytest.raises(StartupError, match=f"unexpected tensor {name}"):
        DraftModel.load(folder, target, torch.float32, CPU)


def test_a_wrapped_target_gives_the_same_rows(tmp_path: Path) -> None:
    """Of a multimodal wrapper the text part's config and tensors are read; oracle: the same target unwrapped."""
    draft = write_draft(tmp_path / "draft", draft_config(), draft_tensors(draft_config()))
    plain = write_target(tmp_path / "target", tied=False)
    wrapped = write_draft(
        tmp_path / "wrapped",
        {"model_type": "kimi_k25", "text_config": json.loads((plain / "config.json").read_text())},
        {f"language_model.{name}": tensor for name, tensor in load_file(plain / "model.safetensors").items()},
    )
    expected, found = (load_weights(DraftConfig.load(draft), draft, t, torch.float32, CPU) for t in (plain, wrapped))
    assert torch.equal(found.embedding, expected.embedding)
    x = torch.randn(4, HIDDEN)
    assert torch.equal(found.head(x), expected.head(x))


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_quantised_rows_of_a_target_are_refused(name: str, tmp_path: Path) -> None:
    """They would be read without their scales."""
    draft = write_draft(tmp_path / "draft", draft_config(), draft_tensors(draft_config()))
    target = write_target(tmp_path / "target", tied=False)
    tensors = load_file(target / "model.safetensors")
    parts, _ = int4_weight(tensors.pop(f"{name}.weight"))
    save_file(tensors | {f"{name}.{suffix}": part for suffix, part in parts.items()}, target / "model.safetensors")
    with pytest.raises(StartupError, match=rf"tensor {name}\.weight_packed is quantised"):
        DraftModel.load(draft, target, torch.float32, CPU)
