"""Reading a checkpoint: each rank gets exactly its part of every weight, in whatever form it is stored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tandem.checkpoints.folder import CheckpointFolder
from tandem.checkpoints.shard import Shard
from tandem.checkpoints.weights import WeightReader
from tandem.errors import StartupError
from tests.fakes.quantized_folders import FP8_CONFIG, INT4_CONFIG, fp8_weight, int4_weight

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def plain_weight(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return {"weight": weight.bfloat16()}, weight.bfloat16().float()


FORMS: dict[str, tuple[Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]], Any]] = {
    "plain": (plain_weight, None),
    "fp8": (fp8_weight, FP8_CONFIG),
    "int4": (int4_weight, INT4_CONFIG),
}


def write(folder: Path, tensors: Tensors, **config: Any) -> CheckpointFolder:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return CheckpointFolder(folder)


def stored(form: str, folder: Path, shapes: dict[str, tuple[int, int]]) -> tuple[CheckpointFolder, Tensors]:
    """Random weights in a form, with the dense values they stand for."""
    torch.manual_seed(0)
    quantize, quantization = FORMS[form]
    tensors: Tensors = {}
    dense: Tensors = {}
    for name, shape in shapes.items():
        parts, dense[name] = quantize(torch.randn(shape) * torch.rand(shape[0], 1))
        tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
    config = {"quantization_config": quantization} if quantization else {}
    return write(folder, tensors, **config), dense


def read(folder: CheckpointFolder, **options: Any) -> WeightReader:
    return WeightReader(folder, torch.float32, CPU, **options)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_shards_are_slices_of_the_whole(form: str, dim: int, count: int, tmp_path: Path) -> None:
    """Side by side, the ranks' parts are the weight, bit for bit: also where FP8 parts begin inside a block (576 / 8
    rows, 768 / 8 columns)."""
    folder, dense = stored(form, tmp_path, {"x": (576, 768)})
    parts = [read(folder).dense("x", (576, 768), Shard(i, count), dim) for i in range(count)]
    assert torch.equal(torch.cat(parts, dim), dense["x"])
    assert parts[0].dtype == torch.float32


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_a_fused_layer_has_the_rows_of_each_weight_one_after_another(form: str, dim: int, tmp_path: Path) -> None:
    """Oracle: the product with each weight's own slice, in fp64. Off by no more than 256 products' sum in fp32 is."""
    shapes = {"q": (320, 256), "k": (72, 256), "v": (72, 256)}
    folder, dense = stored(form, tmp_path, shapes)
    names = [(name, rows) for name, (rows, _) in shapes.items()]
    x = torch.randn(5, 256)
    for i in range(8):
        part = x if dim == 0 else x.chunk(8, 1)[i]
        layer = read(folder).linear(names, 256, Shard(i, 8), dim)
        weight = torch.cat([dense[name].chunk(8, dim)[i] for name, _ in names]).double()
        expected = part.double() @ weight.t()
        room = 5e-7 * (part.double().abs() @ weight.abs().t() + 1)
        assert ((layer(part) - expected).abs() <= room).all()
        residual = torch.randn(expected.shape)
        assert ((layer.added_to(residual, part) - residual - expected).abs() <= room).all()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(["fp8", "int4"]),
    rows=st.integers(1, 300),
    groups=st.integers(1, 9),
    cut=st.integers(0, 31),
    shard=st.sampled_from([(0, 1), (0, 3), (2, 3), (3, 5)]),
)
def test_any_size_is_read_right(
    form: str, rows: int, groups: int, cut: int, shard: tuple[int, int], tmp_path: Path
) -> None:
    """Any shape the format allows, split by columns: FP8 also with partial last blocks, INT4 by whole groups."""
    index, count = shard
    columns = groups * 32 * count - (cut * count if form == "fp8" else 0)
    folder, dense = stored(form, tmp_path, {"x": (rows, columns)})
    part = read(folder).dense("x", (rows, columns), Shard(index, count), 1)
    assert torch.equal(part, dense["x"].chunk(count, 1)[index])


@pytest.mark.parametrize("scale_type", [torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_scales_of_other_types(scale_type: torch.dtype, tmp_path: Path) -> None:
    """Scales may be stored in bf16 or as powers of two."""
    parts, _ = fp8_weight(torch.randn(200, 130))
    scale = torch.tensor([[0.5, 4.0], [0.125, 2.0]])
    tensors = {"x.weight": parts["weight"], "x.weight_scale_inv": scale.to(scale_type)}
    dense = read(write(tmp_path, tensors, quantization_config=FP8_CONFIG)).dense("x", (200, 130))
    expected = parts["weight"].float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :130]
    assert torch.equal(dense, expected)


def test_tensors_keep_a_type_of_their_own(tmp_path: Path) -> None:
    """A selection bias stays in fp32 beside bf16 weights; vectors are split like matrices."""
    values = torch.randn(16)
    reader = WeightReader(write(tmp_path, {"bias": values}), torch.bfloat16, CPU)
    assert torch.equal(reader.tensor("bias", (16,), dtype=torch.float32), values)
    assert torch.equal(reader.tensor("bias", (16,), Shard(3, 4)), values[12:].bfloat16())


def test_wrapped_model(tmp_path: Path) -> None:
    """A wrapper's prefix stands before every name, its quantization_config in text_config; errors say the full name."""
    parts, dense = int4_weight(torch.randn(64, 64))
    tensors = {f"language_model.x.{suffix}": part for suffix, part in parts.items()}
    folder = write(tmp_path, tensors, text_config={"quantization_config": INT4_CONFIG})
    reader = read(folder, prefix=folder.text_prefix)
    assert torch.equal(reader.dense("x", (64, 64)), dense)
    assert "x.weight_packed" in reader
    with pytest.raises(StartupError, match=r"tensor language_model\.y\.weight is missing"):
        reader.linear([("y", 64)], 64)


def test_what_is_read_is_reported(tmp_path: Path) -> None:
    """Progress counts the bytes of this rank's part, as stored."""
    seen: list[tuple[str, int]] = []
    folder = write(tmp_path, {"a.weight": torch.zeros(8, 4), "norm": torch.ones(6).bfloat16()})
    reader = read(folder, progress=lambda name, size: seen.append((name, size)))
    reader.linear([("a", 8)], 4, Shard(1, 4), 0)
    reader.tensor("norm", (6,))
    assert seen == [("a.weight", 32), ("norm", 12)]


def test_only_what_nobody_knows_is_unexpected(tmp_path: Path) -> None:
    """Skipped names and prefixes are known; a prefix covers whole parts of a name only."""
    names = ["m.a", "m.experts.1.w", "m.experts.1.v.w", "m.experts.11.w", "m.0.rotary_emb.inv_freq", "vision.w"]
    folder = write(tmp_path, {name: torch.zeros(2) for name in names})
    reader = read(folder, prefix="m.")
    reader.tensor("a", (2,))
    reader.skip("experts.1.")
    folder.skip("vision.w", "absent.")
    with pytest.raises(StartupError, match=r"unexpected tensor m\.experts\.11\.w \(1 in all\)"):
        reader.check_all_read()
    reader.skip("experts.11.w")
    reader.check_all_read()


def refusal(form: str, folder: Path, change: Callable[[Tensors, Any], object], **split: Any) -> str:
    """What is said of a [96, 64] weight x after `change` of its tensors and its config."""
    quantize, quantization = FORMS[form]
    tensors = {f"x.{suffix}": part for suffix, part in quantize(torch.randn(96, 64))[0].items()}
    config = json.loads(json.dumps({"quantization_config": quantization} if quantization else {}))
    change(tensors, config)
    with pytest.raises(StartupError) as caught:
        read(write(folder, tensors, **config)).linear([("x", 96)], 64, **split)
    return str(caught.value)


def resize(name: str) -> Callable[[Tensors, Any], object]:
    return lambda tensors, _: tensors.update({name: tensors[name][:, :-1].contiguous()})


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("plain", lambda t, _: t.pop("x.weight"), "tensor x.weight is missing"),
        ("plain", resize("x.weight"), "tensor x.weight has shape [96, 63], config.json means [96, 64]"),
        ("plain", lambda t, _: t.update({"x.weight": t["x.weight"].int()}), "tensor x.weight is stored as I32"),
        ("fp8", lambda t, _: t.pop("x.weight_scale_inv"), "tensor x.weight_scale_inv is missing"),
        ("fp8", resize("x.weight_scale_inv"), "tensor x.weight_scale_inv has shape [1, 0], config.json means [1, 1]"),
        ("fp8", resize("x.weight"), "tensor x.weight has shape [96, 63], config.json means [96, 64]"),
        (
            "fp8",
            lambda t, _: t.update({"x.weight": t["x.weight"].float().to(torch.float8_e5m2)}),
            "tensor x.weight is stored as F8_E5M2; supported for it: F8_E4M3",
        ),
        ("fp8", lambda _, c: c.clear(), "tensor x.weight is stored in the form fp8, but config.json's"),
        ("int4", lambda t, _: t.pop("x.weight_packed"), "tensor x.weight is missing"),
        ("int4", lambda t, _: t.pop("x.weight_scale"), "tensor x.weight_scale is missing"),
        ("int4", lambda t, _: t.pop("x.weight_shape"), "tensor x.weight_shape is missing"),
        ("int4", resize("x.weight_packed"), "tensor x.weight_packed has shape [96, 7], config.json means [96, 8]"),
        ("int4", resize("x.weight_scale"), "tensor x.weight_scale has shape [96, 1], config.json means [96, 2]"),
        (
            "int4",
            lambda t, _: t.update({"x.weight_shape": torch.tensor([96, 65])}),
            "tensor x.weight_shape says [96, 65], config.json means [96, 64]",
        ),
        (
            "int4",
            lambda t, _: t.update({"x.weight_packed": t["x.weight_packed"].long()}),
            "tensor x.weight_packed is stored as I64; supported for it: I32",
        ),
        ("int4", lambda _, c: c.update(quantization_config=FP8_CONFIG), "quant_method says fp8"),
    ],
)
def test_wrong_tensors_are_named(
    form: str, change: Callable[[Tensors, Any], object], said: str, tmp_path: Path
) -> None:
    assert said in refusal(form, tmp_path, change)


@pytest.mark.parametrize(
    ("form", "key", "value", "said"),
    [
        ("fp8", "quant_method", "awq", "'awq' is not supported; supported: 'fp8' or 'compressed-tensors'"),
        ("fp8", "fmt", "e5m2", "'e5m2' is not supported; supported: 'e4m3'"),
        ("fp8", "weight_block_size", [1, 32], "[1, 32] is not supported; supported: [128, 128]"),
        ("fp8", "activation_scheme", "static", "'static' is not supported; supported: 'dynamic'"),
        ("int4", "format", "float-quantized", "'float-quantized' is not supported; supported: 'pack-quantized'"),
        ("int4", "kv_cache_scheme", {"num_bits": 8}, "{'num_bits': 8} is not supported; supported: nothing"),
        ("int4", "config_groups", {}, "missing"),
        ("int4", "config_groups.group_0.input_activations", {"num_bits": 8}, "is not supported; supported: nothing"),
        ("int4", "config_groups.group_0.weights.num_bits", 8, "8 is not supported; supported: 4"),
        ("int4", "config_groups.group_0.weights.group_size", 128, "128 is not supported; supported: 32"),
        ("int4", "config_groups.group_0.weights.symmetric", False, "False is not supported; supported: True"),
        ("int4", "config_groups.group_0.weights.actorder", "group", "'group' is not supported"),
        ("int4", "config_groups.group_0.weights.strategy", "channel", "'channel' is not supported; supported: 'group'"),
        ("int4", "config_groups.group_0.weights.type", "float", "'float' is not supported; supported: 'int'"),
    ],
)
def test_other_schemes_are_refused_by_key(form: str, key: str, value: Any, said: str, tmp_path: Path) -> None:
    """A scheme that would be read wrong is refused, naming the key, its value and what is supported."""

    def change(_: Tensors, config: Any) -> None:
        *path, last = key.split(".")
        inner = config["quantization_config"]
        for step in path:
            inner = inner[step]
        inner[last] = value

    message = refusal(form, tmp_path, change)
    assert f"config.json: quantization_config.{key}: " in message
    assert said in message


@pytest.mark.parametrize(
    ("form", "shard", "dim", "said"),
    [
        ("plain", Shard(0, 5), 0, "x.weight (dimension 0): 96 cannot be split over 5 ranks"),
        ("fp8", Shard(0, 5), 0, "x (dimension 0): 96 cannot be split over 5 ranks"),
        ("fp8", Shard(0, 5), 1, "x (dimension 1): 64 cannot be split over 5 ranks"),
        ("int4", Shard(1, 4), 1, "x.weight_packed: columns 16 to 32 of 64 must be multiples of 32"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(
    form: str, shard: Shard, dim: int, said: str, tmp_path: Path
) -> None:
    assert said in refusal(form, tmp_path, lambda *_: None, shard=shard, dim=dim)


def test_one_layer_of_two_forms_is_refused(tmp_path: Path) -> None:
    """Weights that are multiplied together must be stored alike."""
    tensors = {f"x.{suffix}": part for suffix, part in fp8_weight(torch.randn(64, 64))[0].items()}
    reader = read(write(tmp_path, {**tensors, "y.weight": torch.zeros(64, 64)}, quantization_config=FP8_CONFIG))
    with pytest.raises(StartupError, match=r"x\.weight and y\.weight are used together, .* fp8 and plain"):
        reader.linear([("x", 64), ("y", 64)], 64)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_quantised_weight_is_never_read_as_a_plain_tensor(form: str, tmp_path: Path) -> None:
    """An embedding without its scales would be nonsense: refused by name, for both readers of tensors."""
    folder, _ = stored(form, tmp_path, {"embed": (64, 64)})
    said = r"tensor embed\.weight(_packed)? is (stored as F8_E4M3|quantised)"
    with pytest.raises(StartupError, match=said):
        folder.tensor("embed.weight", (64, 64), torch.float32)
    with pytest.raises(StartupError, match=said):
        read(folder).tensor("embed.weight", (64, 64))


def test_a_file_that_is_missing_or_cut_is_named(tmp_path: Path) -> None:
    """An index may name files that are not there or not whole."""
    write(tmp_path, {"a": torch.zeros(64)})
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-8])
    (tmp_path / "good.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    weight_map = {"a": "good.safetensors", "b": "good.safetensors", "c": "cut.safetensors", "d": "gone.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    folder = CheckpointFolder(tmp_path)
    assert folder.tensor("a", (64,), torch.float32).sum() == 0
    for name in "bcd":
        with pytest.raises(StartupError, match=rf"{weight_map[name]}: tensor {name} cannot be read"):
            folder.tensor(name, (64,), torch.float32)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts mapped pages as Linux does")
def test_files_do_not_stay_in_memory_once_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped pages of what was read are given back: 32 MiB are read, no more than a few stay."""
    names = [str(i) for i in range(32)]
    reader = read(write(tmp_path, {f"{name}.weight": torch.ones(512, 512) for name in names}))
    monkeypatch.setattr("tandem.checkpoints.folder._MAX_MAPPED", 4 * 2**20)
    before = mapped_bytes()
    layers = [reader.linear([(name, 512)], 512) for name in names]
    assert mapped_bytes() - before < 12 * 2**20
    assert all(layer(torch.ones(4, 512)).eq(512).all() for layer in layers)


def mapped_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))
