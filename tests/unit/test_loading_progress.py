"""Progress of loading: seen on a terminal and in logs, from nothing but what the reader tells."""

import io
import logging
import sys
from types import SimpleNamespace

import pytest

from tandem.checkpoints import progress
from tandem.checkpoints.progress import loading_progress

READ = [("model.embed_tokens.weight", 400_000_000), *((f"model.layers.{i}.mlp.x", 200_000_000) for i in range(3))]


def test_log_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A line when some seconds have passed, not for every tensor, and one at the end with all bytes."""
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO), loading_progress("target", 4) as told:
        for name, size in READ:
            now += 2
            told(name, size)
    assert caplog.messages == ["target: layer 1 of 4, 0.8 GB in 6 s, 0.1 GB/s", "target: 1.0 GB in 8 s, 0.1 GB/s"]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar counts layers and bytes."""
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", screen)
    with loading_progress("target", 3) as told:
        for name, size in READ:
            told(name, size)
    assert "target" in screen.getvalue()
    assert "2 of 3 layers, 1.0 GB" in screen.getvalue()
