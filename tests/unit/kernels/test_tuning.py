"""Which file and class launch parameters come from."""

import json
from pathlib import Path

import pytest
import torch

from tandem.kernels import tuning
from tandem.kernels.tuning import tuned

FILES = {
    "default.json": {"k": {"any": {"n": 1}, "wide": {"n": 2}}, "only": {"any": {"n": 3}}},
    "NVIDIA_H200.json": {"k": {"narrow": {"n": 4}}},
}


@pytest.mark.parametrize(
    ("kernel", "shape_class", "expected"),
    [("k", "narrow", 4), ("k", "wide", 2), ("k", "other", 1), ("only", "wide", 3)],
    ids=["the GPU's", "the default's", "any of the default", "a kernel only the default knows"],
)
def test_the_gpus_own_numbers_come_before_the_default(
    kernel: str, shape_class: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    tuning._tuned.cache_clear()
    tuning._file.cache_clear()
    try:
        assert tuned(kernel, shape_class, torch.device("cuda", 0))["n"] == expected
        with pytest.raises(KeyError, match="neither 'wide' nor 'any'"):
            tuned("unknown", "wide", torch.device("cpu"))
    finally:
        tuning._tuned.cache_clear()
        tuning._file.cache_clear()


def test_every_file_gives_the_kernels_all_their_numbers() -> None:
    """A file for a GPU leaves no parameter out: classes replace each other whole."""
    default = json.loads((tuning.FOLDER / "default.json").read_text())
    names = {kernel: {frozenset(numbers) for numbers in classes.values()} for kernel, classes in default.items()}
    for path in tuning.FOLDER.glob("*.json"):
        for kernel, classes in json.loads(path.read_text()).items():
            for shape_class, numbers in classes.items():
                assert frozenset(numbers) in names[kernel], f"{path.name}: {kernel}, {shape_class}"
