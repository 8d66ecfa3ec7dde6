"""Tests of what only a GPU runs: captured steps, compiled kernels. Elsewhere they are skipped, and say why.

TRITON_INTERPRET=0 python -m pytest tests/gpu
"""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def why_not_here() -> str | None:
    """What keeps these tests from running in this process; None: nothing."""
    if not torch.cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} finds none"
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "Triton kernels are interpreted in this process: run tests/gpu by itself with TRITON_INTERPRET=0"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not_here()
    for item in items:
        if reason and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
