"""How pip is configured on this machine, for a build that runs elsewhere."""

import ast
import subprocess
import sys
from pathlib import Path


def pip_settings(folder: Path) -> tuple[Path, list[Path]]:
    """A pip.conf in `folder` that says what all of this machine's say, and the files and folders that it names."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    settings = parse_settings(listed.stdout)
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    return file, [path for path in paths_in(settings) if path.exists()]


def parse_settings(listed: str) -> dict[str, str]:
    """By key, from what `pip config list` prints: variables of the environment come last and go first."""
    settings = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            settings[key] = " ".join(ast.literal_eval(value).split())
    return settings


def paths_in(settings: dict[str, str]) -> list[Path]:
    """Each once, none inside another. Of an index in a folder its parent: what it lists lies beside it."""
    words = [word for value in settings.values() for word in value.split()]
    paths = {Path(word) for word in words if word.startswith("/")}
    paths |= {Path(word.removeprefix("file://")).parent for word in words if word.startswith("file:///")}
    return sorted(path for path in paths if not paths & set(path.parents))
