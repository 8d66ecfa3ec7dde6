"""The library is compiled once, by whoever comes first; where it cannot be, torch serves and the log says why."""

import ctypes
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError
from tandem.native import build as building
from tandem.native import library
from tandem.native.build import FLAGS, CannotBuild, build
from tests.fakes.random_targets import random_architecture
from tests.unit.native.runners import native_model
from tests.unit.native.test_native_logits import steps
from tests.unit.test_gguf_convert import run_convert, tiny_llama, weights_of, write_gguf
from verifier_service.models import native_decoder
from verifier_service.models.decoder import DecoderModel
from verifier_service.models.loading import load_cpu_model

QUICK = ("-O0", *FLAGS[1:])
"""Compiled in a tenth of the time."""


@pytest.mark.slow
def test_two_processes_that_build_at_once_get_one_library(tmp_path: Path) -> None:
    """Neither sees the other's half-written file, and nothing else is left behind."""
    program = f"from tandem.native.build import build; print(build({QUICK!r}))"
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "TANDEM_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=120)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    (path,) = map(Path, paths)
    assert list((tmp_path / "cache").iterdir()) == [path]
    ctypes.CDLL(str(path))


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_without_a_compiler_torch_serves_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    random_architecture(tmp_path / "model", "qwen3")
    monkeypatch.setenv("CXX", "no-such-compiler")
    folder = CheckpointFolder(tmp_path / "model")
    with caplog.at_level(logging.INFO):
        model = load_cpu_model(folder, torch.bfloat16, "auto")
    assert isinstance(model, DecoderModel)
    assert "no C++ compiler" in caplog.text
    with pytest.raises(StartupError, match=r"verifier\.cpu_kernels: native .* no C\+\+ compiler"):
        load_cpu_model(CheckpointFolder(tmp_path / "model"), torch.bfloat16, "native")


def test_a_compiler_that_fails_is_named_with_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "SOURCES", tmp_path)
    (tmp_path / "broken.cpp").write_text("int x = nothing_of_that_name;")
    with pytest.raises(CannotBuild, match=r"failed: .*nothing_of_that_name"):
        build(QUICK)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["x86-64", "haswell"])
def test_older_machines_compute_the_same(tmp_path: Path, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX2, and with it but without AVX-512 (x86 only): 4-bit products add whole numbers exactly, so what is
    left is how sums of floats round."""
    if platform.machine() != "x86_64":
        pytest.skip("an x86 compiler's flags")
    write_gguf(tmp_path / "a.gguf", weights_of(tiny_llama(tied=True)), gguf.GGMLQuantizationType.Q4_1)
    run_convert(tmp_path / "a.gguf", tmp_path / "model", keep_blocks=True)
    random_architecture(tmp_path / "bf16", "qwen3")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    flags = [flag if "march" not in flag else f"-march={machine}" for flag in ("-O1", *FLAGS[1:])]
    older = library.load(build(flags))
    for folder, off in ((tmp_path / "model", 0.2), (tmp_path / "bf16", 0.01)):
        expected = [part for step in steps(native_model(folder), 288) for part in step]
        with monkeypatch.context() as patch:
            patch.setattr(native_decoder, "load", lambda: older)
            found = [part for step in steps(native_model(folder), 288) for part in step]
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() <= off * theirs.norm()


@pytest.mark.parametrize(
    ("kind", "dtype", "reason"),
    [
        ("qwen3-moe", torch.bfloat16, "no dense decoder"),
        ("deepseek-v3", torch.bfloat16, "no dense decoder"),
        ("qwen3", torch.float32, "dtype is not bfloat16"),
    ],
)
def test_what_it_cannot_run_stays_on_torch(
    tmp_path: Path, kind: str, dtype: torch.dtype, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    random_architecture(tmp_path, kind)
    with caplog.at_level(logging.INFO):
        assert isinstance(load_cpu_model(CheckpointFolder(tmp_path), dtype, "auto"), DecoderModel)
    assert reason in caplog.text
