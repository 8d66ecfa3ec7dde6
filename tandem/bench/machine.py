"""Names the machine that measured, without importing torch."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine() -> dict[str, str | int | float]:
    """CPU model, usable cores, memory in GiB, operating system."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of Python and the packages that matter for speed; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in ("tandem", "torch", "grpcio", "protobuf"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def machine_line() -> str:
    """Both in one short line."""
    about, installed = machine(), versions()
    torch = f", torch {installed['torch']}" if "torch" in installed else ""
    return f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB{torch}"


def _field(path: str, key: str) -> str | None:
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None
