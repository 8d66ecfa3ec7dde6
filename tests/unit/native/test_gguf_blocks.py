"""4-bit folders keep the GGUF's own values, exactly, for the native path; anyone else reads them as bf16."""

from pathlib import Path

import gguf
import pytest
import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError
from tandem.native.library import Matrix, load
from tests.unit.test_gguf_convert import HEADS, KV_HEADS, run_convert, tiny_llama, weights_of, write_gguf

FORMS = {"Q4_0": "q4", "Q4_1": "q4", "Q8_0": "q8"}


@pytest.fixture(scope="module", params=FORMS)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("gguf")
    kind = getattr(gguf.GGMLQuantizationType, request.param)
    write_gguf(folder / "a.gguf", weights_of(tiny_llama(tied=False)), kind)
    run_convert(folder / "a.gguf", folder / "model", keep_blocks=True)
    return folder, FORMS[request.param]


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """By gguf, in fp32, under Hugging Face's names, rows of q and k in its order."""
    found = {}
    for tensor in gguf.GGUFReader(folder / "a.gguf").tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for part, heads in (("attn_q.", HEADS), ("attn_k.", KV_HEADS)):
            if part in tensor.name:
                values = values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        found[tensor.name] = values
    return found


def test_blocks_hold_what_gguf_dequantises_to(converted: tuple[Path, str]) -> None:
    """Bit for bit: as stored, and as the native matrix has them."""
    folder, form = converted
    model, expected = CheckpointFolder(folder / "model"), dequantised(folder)
    for name, short in {
        "model.embed_tokens": "token_embd",
        "lm_head": "output",
        "model.layers.1.self_attn.q_proj": "blk.1.attn_q",
        "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    }.items():
        values = expected[f"{short}.weight"]
        blocks = model.blocks(f"{name}.weight", (values.shape[0], values.shape[1]))
        assert blocks
        assert blocks.form == form
        assert torch.equal(blocks.dense(), values)
        matrix = Matrix(load(), blocks.form, blocks.values, blocks.scales, blocks.minima)
        assert torch.equal(torch.stack([matrix.row(i) for i in range(len(values))]), values)


def test_other_readers_get_bf16(converted: tuple[Path, str]) -> None:
    """Whole, and any part of rows or columns."""
    folder, _ = converted
    model, expected = CheckpointFolder(folder / "model"), dequantised(folder)["blk.0.ffn_down.weight"].bfloat16()
    name, shape = "model.layers.0.mlp.down_proj.weight", tuple(expected.shape)
    assert name in model
    assert model.kind(name) == "BF16"
    assert torch.equal(model.tensor(name, shape, torch.bfloat16), expected)
    assert torch.equal(model.part(name, shape, ("BF16",), 0, range(3, 20)), expected[3:20])
    assert torch.equal(model.part(name, shape, ("BF16",), 1, range(32, 64)), expected[:, 32:64])


def test_a_wrong_shape_names_the_tensor(converted: tuple[Path, str]) -> None:
    model = CheckpointFolder(converted[0] / "model")
    with pytest.raises(StartupError, match=r"tensor lm_head\.weight_q\d has shape"):
        model.tensor("lm_head.weight", (64, 64), torch.bfloat16)
