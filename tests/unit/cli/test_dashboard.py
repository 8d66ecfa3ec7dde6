"""`tandem dashboard` finds the page that a gateway serves, or says why there is none."""

import webbrowser
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.metrics import serve_metrics
from tests.fakes.ports import free_port


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    urls: list[str] = []
    monkeypatch.setattr(webbrowser, "open", urls.append)
    return urls


def config(folder: Path, gateway: str) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "stack.yaml").write_text(f"target: .\ngateway: {gateway}")
    return folder / "stack.yaml"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["dashboard", *arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def port() -> int:
    """Where something answers."""
    port = free_port()
    serve_metrics(f"127.0.0.1:{port}", "key", CollectorRegistry())
    return port


def test_it_opens_the_configs_page(tmp_path: Path, port: int, opened: list[str]) -> None:
    """As this machine reaches it."""
    path = config(tmp_path, f"{{metrics_listen: '0.0.0.0:{port}'}}")
    url = f"http://127.0.0.1:{port}/dashboard/"
    assert run("--config", str(path)) == (0, url)
    assert opened == [url]


def test_an_address_needs_no_config(tmp_path: Path, port: int, opened: list[str]) -> None:
    assert run("--address", f"127.0.0.1:{port}", "--no-open", "--config", str(tmp_path / "none.yaml"))[0] == 0
    assert opened == []


def test_nothing_answers(tmp_path: Path, opened: list[str]) -> None:
    code, output = run("--address", f"127.0.0.1:{free_port()}")
    assert (code, opened) == (1, [])
    assert "is the stack up?" in output


def test_a_gateway_without_http_has_no_page(tmp_path: Path) -> None:
    code, output = run("--config", str(config(tmp_path, "{}")))
    assert code == 2
    assert "gateway.metrics_listen is not set" in output
