"""What one GPU needs to show, in under 8 minutes: the GPU tests pass, and what captured steps and kernels are worth.

    benchmarks/gpu_check.sh --json benchmarks/results/gpu-check.json

Each part is a process of its own with a time limit; its figures are kept as they are measured, so a part that is cut
off leaves those it had, and so does a run that is. Exits 1 if a GPU test or a part fails. --tiny proves the script on a
CPU; its figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from rich.table import Table

from tandem.bench.machine import machine, machine_line, versions
from tandem.cli.console import console

TESTS = "tests"
LIMITS = {TESTS: 150.0, "attention": 60.0, "mixture": 45.0, "verify-qwen3-8b": 100.0, "verify-kimi-k2": 100.0}
"""Seconds of each part, start and loading included; in the order they run. All together stay below 8 minutes."""
_HIDDEN = {"what"}
_DIGITS = {"gb_per_s": 0, "copy_gb_per_s": 0, "us": 1, "experts": 0}


def run_tests(seconds: float) -> dict[str, Any]:
    """tests/gpu: counts, the names of those that failed, and the end of what they wrote."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider"]
        outcome = _run([*command, f"--junit-xml={report}"], seconds, {"TRITON_INTERPRET": "0"})
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    failed = [_name(c) for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    row = {"tests": len(cases), "passed": len(cases) - len(failed) - len(skipped), "skipped": len(skipped)}
    failing = outcome["status"] != "ended" or bool(failed)
    return outcome | {"rows": [row], "failed": failed, "status": "failed" if failing else "ended"}


def run_part(name: str, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """Rows of one part, as far as it came."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", name, "--rows", str(rows)]
        outcome = _run(command + ["--tiny"] * options.tiny, seconds, {"TRITON_INTERPRET": "0"})
        lines = rows.read_text().splitlines() if rows.is_file() else []
    return outcome | {"rows": [json.loads(line) for line in lines]}


def one_part(name: str, rows: Path, is_tiny: bool) -> None:
    """In the part's own process: a line of JSON per row."""
    import torch

    from benchmarks.gpu_parts import PARTS, Where

    where = Where(torch.device("cpu" if is_tiny else "cuda"), is_tiny)
    with rows.open("w", buffering=1) as file, torch.inference_mode():
        for row in PARTS[name](where):
            file.write(json.dumps(row) + "\n")


def tables_of(name: str, part: dict[str, Any]) -> list[Table]:
    """A table for each kind of row."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in part["rows"]:
        kinds.setdefault(tuple(row), []).append(row)
    tables = []
    for keys, rows in kinds.items():
        state = "" if part["status"] == "ended" else f" ({part['status']})"
        grid = Table(title=f"{name}{state}, {part['seconds']:.0f} s", title_justify="left")
        shown = [key for key in keys if key not in _HIDDEN or len({row[key] for row in rows}) > 1]
        for key in shown:
            grid.add_column(key, justify="right")
        if "copy_gb_per_s" in keys:
            grid.add_column("of copy", justify="right")
        for row in rows:
            share = [f"{row['gb_per_s'] / row['copy_gb_per_s']:.0%}"] if "copy_gb_per_s" in row else []
            grid.add_row(*(_shown(key, row[key]) for key in shown), *share)
        tables.append(grid)
    return tables


def check(options: argparse.Namespace) -> int:
    """All parts; the file is written anew after each."""
    import torch

    if not options.tiny and not torch.cuda.is_available():
        print(
            f"no CUDA device: torch {torch.__version__} finds none; --tiny tries the script on a CPU", file=sys.stderr
        )
        return 2
    result: dict[str, Any] = {
        "gpu": None if options.tiny else torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "tiny": options.tiny,
        "machine": machine(),
        "machine_line": machine_line(),
        "versions": versions(),
        "parts": {},
    }
    console.print(f"{result['gpu'] or 'tiny sizes on the CPU'}; {result['machine_line']}", soft_wrap=True)
    for name in options.parts:
        seconds = LIMITS[name]
        part = run_tests(seconds) if name == TESTS else run_part(name, seconds, options)
        result["parts"][name] = part
        for table in tables_of(name, part):
            console.print(table)
        if part["status"] != "ended":
            console.print(f"{name}: {part['status']}\n{part['tail']}", markup=False, soft_wrap=True)
        for failed in part.get("failed", ()):
            console.print(f"{name}: failed: {failed}", markup=False, soft_wrap=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(part["status"] == "failed" for part in result["parts"].values()))


def _run(command: list[str], seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """status: ended, failed or cut off; the time it took and the end of what it wrote."""
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
        status, output = "failed" if done.returncode else "ended", done.stdout
    except subprocess.TimeoutExpired as expired:
        status, output = f"cut off after {seconds:.0f} s", expired.stdout or b""
    tail = "\n".join(output.decode(errors="replace").splitlines()[-25:])
    return {"status": status, "seconds": time.perf_counter() - started, "tail": tail}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _shown(key: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:.{_DIGITS.get(key, 2)}f}"
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _parts(text: str) -> list[str]:
    names = text.split(",")
    if wrong := [name for name in names if name not in LIMITS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(LIMITS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", type=_parts, default=list(LIMITS), help=f"of {', '.join(LIMITS)}, comma-separated")
    parser.add_argument("--json", type=Path, help="written anew after each part")
    parser.add_argument("--part", choices=LIMITS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        one_part(options.part, options.rows, options.tiny)
    else:
        sys.exit(check(options))


if __name__ == "__main__":
    main()
