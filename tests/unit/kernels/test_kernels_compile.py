"""What the interpreter runs, the compiler may refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """Down to machine code, by the assembler that comes with Triton."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.unit.kernels.compile_for_hopper"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr[-3000:]
    for kernel in ("attend", "_product", "_walk"):
        assert f"compiling {kernel}\n" in finished.stdout
        assert list(tmp_path.rglob(f"{kernel}.cubin"))
