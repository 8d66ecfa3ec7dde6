"""What an image holds is what an installed Tandem holds."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGES = sorted(include.removesuffix("*") for include in SETTINGS["packages"]["find"]["include"])


def test_files_that_are_not_python_are_installed() -> None:
    """An installation, unlike a checkout, has no other files than those that pyproject.toml names."""
    listed = {
        file for package, globs in SETTINGS["package-data"].items() for g in globs for file in (ROOT / package).glob(g)
    }
    kept = {file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file()}
    left_out = {f for f in kept - listed if f.suffix not in (".py", ".pyi", ".pyc") and "__pycache__" not in f.parts}
    assert not left_out


def test_images_are_built_of_all_packages() -> None:
    """Each is copied, and let through to be copied."""
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    let_through = re.findall(r"^!(\w+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == PACKAGES
    assert set(PACKAGES) <= set(let_through)
