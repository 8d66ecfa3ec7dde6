"""Compiles the C++ beside this file for this machine, once, into a cache folder."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
"""No contraction: how the compiler would fuse products and sums may differ from place to place, and with it a row's
bits. Where they are fused the code says so."""
_COMPILE_SECONDS = 300


class CannotBuild(Exception):
    """Why there is no native library here."""


def build(flags: Sequence[str] = FLAGS) -> Path:
    """The shared library, compiled if the cache lacks it. Processes may call it at once: each compiles under a name of
    its own, and renaming is atomic."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise CannotBuild("no C++ compiler: neither CXX nor c++ is found")
    sources = sorted(SOURCES.glob("*.cpp"))
    folder = cache_folder()
    library = folder / f"tandem-{_key(compiler, flags)}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
            made = Path(scratch) / library.name
            _run([compiler, *flags, *map(str, sources), "-o", str(made)])
            made.replace(library)
    except OSError as error:
        raise CannotBuild(f"{folder}: {error.strerror}") from None
    return library


def cache_folder() -> Path:
    """TANDEM_CACHE, or a folder of ours in the user's cache."""
    if own := os.environ.get("TANDEM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem"


def cpu_features() -> frozenset[str]:
    """Instruction sets, as /proc/cpuinfo names them; empty where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _key(compiler: str, flags: Sequence[str]) -> str:
    """Of all that the library depends on."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    machine = (platform.machine(), *sorted(cpu_features()))
    digest.update("\0".join((*flags, *machine, _run([compiler, "--version"]))).encode())
    return digest.hexdigest()[:24]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"{command[0]}: took longer than {_COMPILE_SECONDS} s") from None
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise CannotBuild(f"{command[0]} failed: {reason}")
    return done.stdout
