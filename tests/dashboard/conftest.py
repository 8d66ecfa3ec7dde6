"""`make dashboard-test` installs what these tests need and runs them; a run of all tests skips them and says why."""

import importlib.util
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

_MISSING = [program for program in ("chromium", "chromedriver") if not shutil.which(program)]
if not importlib.util.find_spec("selenium"):
    _MISSING.append("selenium")


class _Skipped(pytest.Module):
    """A test file that is not imported."""

    def collect(self) -> NoReturn:
        why = f"no {', '.join(_MISSING)}" if _MISSING else "they take minutes"
        pytest.skip(f"{why}: `make dashboard-test` runs these", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Pytest's hook: what a file of tests becomes."""
    asked = any("tests/dashboard" in argument for argument in parent.config.invocation_params.args)
    return None if asked and not _MISSING else _Skipped.from_parent(parent, path=module_path)
