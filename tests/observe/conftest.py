"""`make observe-test` installs what these tests need and runs them; a run of all tests skips them, with the reason."""

import shutil
from pathlib import Path

import pytest

from tests.fakes.left_out import left_out

_MISSING = [tool for tool in ("prometheus", "promtool", "amtool") if not shutil.which(tool)]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Pytest's hook: what a file of tests becomes."""
    asked = any("observe" in argument for argument in parent.config.invocation_params.args)
    if asked and not _MISSING:
        return None
    why = f"no {', '.join(_MISSING)}" if _MISSING else "they take minutes"
    return left_out(parent, module_path, f"{why}: `make observe-test` runs these")
