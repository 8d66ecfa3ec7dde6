"""`tandem bench --profile`: where the time of the verifier's steps goes."""

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.status import Status

from tandem.cli.console import console, errors
from tandem.config import load_config
from tandem.errors import StartupError


async def measure_steps(config_path: Path, clients: tuple[int, ...], runs: int) -> dict[str, Any]:
    """Runs the verifier's engine on the config's target in a process of its own, prints the table and gives everything
    for JSON. StartupError with the last line that process wrote if it fails."""
    from tandem.bench.step_profile import from_json, lines, table

    load_config(config_path)  # its errors are better told from here
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "profile.json", Path(folder) / "log"
        command = [sys.executable, "-m", "verifier_service.profiling", "--config", str(config_path)]
        command += ["--json", str(result), "--clients", ",".join(map(str, clients)), "--runs", str(runs)]
        with Status("profiling steps", console=errors), log.open("wb") as said:
            process = await asyncio.create_subprocess_exec(*command, stdout=said, stderr=said)
            try:
                code = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if code:
            told = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise StartupError(f"--profile: its process ended with {code}: {told[-1]}")
        measured: dict[str, Any] = json.loads(result.read_text())
    profiles = from_json(measured)
    console.print(table(profiles))
    for line in lines(profiles):
        console.print(line, soft_wrap=True)
    return measured
