"""The script of the job that checks the models, run as the job would run it."""

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import named, render


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two files and their sums, as docs/deploy.md has them made."""
    folder = tmp_path / "models"
    (folder / "target").mkdir(parents=True)
    (folder / "target" / "config.json").write_text("{}")
    (folder / "target" / "model 1.safetensors").write_bytes(bytes(range(256)))
    command = "find . -type f ! -path ./SHA256SUMS -exec sha256sum {} + > SHA256SUMS"
    subprocess.run(["sh", "-c", command], cwd=folder, check=True)
    return folder


def _check(models: Path) -> subprocess.CompletedProcess[str]:
    template = named(render("model-store"), "Job", "model-checksum")["spec"]["template"]
    *shell, script = template["spec"]["containers"][0]["command"]
    (models.parent / "tmp").mkdir(exist_ok=True)
    script = re.sub(r" /(?=(models|tmp)\b)", f" {models.parent}/", script)
    return subprocess.run([*shell, script], capture_output=True, text=True, timeout=20)


def test_what_came_whole_passes(models: Path) -> None:
    done = _check(models)
    assert (done.returncode, done.stdout) == (0, "2 files are what SHA256SUMS says\n")


def test_other_bytes_fail(models: Path) -> None:
    (models / "target" / "model 1.safetensors").write_bytes(bytes(256))
    done = _check(models)
    assert done.returncode != 0
    assert "./target/model 1.safetensors: FAILED" in done.stdout


def test_missing_file_fails(models: Path) -> None:
    (models / "target" / "config.json").unlink()
    assert _check(models).returncode != 0


def test_file_that_is_not_listed_fails(models: Path) -> None:
    (models / "target" / "model 2.safetensors").write_bytes(b"")
    done = _check(models)
    assert done.returncode != 0
    assert "model 2.safetensors" in done.stdout


def test_line_that_is_no_sum_fails(models: Path) -> None:
    sums = models / "SHA256SUMS"
    digest = hashlib.sha256(b"{}").hexdigest()
    sums.write_text(sums.read_text().replace(digest, digest[:-1]))
    assert _check(models).returncode != 0
