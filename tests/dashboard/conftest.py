"""`make dashboard-test` installs what these tests need and runs them; a run of all tests skips them and says why."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.fakes.left_out import left_out

_MISSING = [program for program in ("chromium", "chromedriver") if not shutil.which(program)]
if not importlib.util.find_spec("selenium"):
    _MISSING.append("selenium")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Pytest's hook: what a file of tests becomes."""
    asked = any("tests/dashboard" in argument for argument in parent.config.invocation_params.args)
    if asked and not _MISSING:
        return None
    why = f"no {', '.join(_MISSING)}" if _MISSING else "they take minutes"
    return left_out(parent, module_path, f"{why}: `make dashboard-test` runs these")
