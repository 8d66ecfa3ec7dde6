"""`make observe-test` installs what these tests need and runs them; a run of all tests skips them, with the reason."""

import shutil
from pathlib import Path
from typing import NoReturn

import pytest

_MISSING = [tool for tool in ("prometheus", "promtool", "amtool") if not shutil.which(tool)]


class _Skipped(pytest.Module):
    """A test file that is not imported."""

    def collect(self) -> NoReturn:
        why = f"no {', '.join(_MISSING)}" if _MISSING else "they take minutes"
        pytest.skip(f"{why}: `make observe-test` runs these", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Pytest's hook: what a file of tests becomes."""
    asked = any("observe" in argument for argument in parent.config.invocation_params.args)
    return None if asked and not _MISSING else _Skipped.from_parent(parent, path=module_path)
