"""Test files that are not imported, because what they need is not here or nobody asked for them."""

from pathlib import Path
from typing import NoReturn

import pytest


class _LeftOut(pytest.Module):
    reason: str

    def collect(self) -> NoReturn:
        pytest.skip(self.reason, allow_module_level=True)


def left_out(parent: pytest.Collector, path: Path, reason: str) -> pytest.Module:
    """The file as one skip that says why: what pytest_pycollect_makemodule may return."""
    module = _LeftOut.from_parent(parent, path=path)
    module.reason = reason
    return module
