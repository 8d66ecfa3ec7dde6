"""The shipped files, by the tools that come with Prometheus and Alertmanager."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.observe.shipped import FOLDER, RULES, alerts, write_config

CASES = FOLDER / "rules" / "tests" / "alerts.yaml"
ALERTMANAGER = FOLDER / "alertmanager.yml"


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_config(tmp_path: Path) -> None:
    config = write_config(tmp_path, {("tandem", "gateway"): 7610}, "15s")
    _run("promtool", "check", "config", config)


def test_prometheus_takes_the_rules() -> None:
    _run("promtool", "check", "rules", "--lint=all", "--lint-fatal", *RULES)


def test_alerts_fire_when_they_should_and_only_then() -> None:
    _run("promtool", "test", "rules", CASES)


def test_every_alert_is_shown_firing_and_not_firing() -> None:
    shown = {
        (case["alertname"], bool(case["exp_alerts"]))
        for test in yaml.safe_load(CASES.read_text())["tests"]
        for case in test["alert_rule_test"]
    }
    assert shown == {(alert, fires) for alert in alerts() for fires in (True, False)}


def test_alertmanager_takes_its_config() -> None:
    _run("amtool", "check-config", ALERTMANAGER)


@pytest.mark.parametrize(("severity", "receiver"), [("critical", "pager"), ("warning", "tickets"), ("", "tickets")])
def test_alerts_reach_whom_they_are_for(severity: str, receiver: str) -> None:
    labels = [f"severity={severity}", "alertname=TandemX", "namespace=tandem"]
    reached = _run("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels)
    assert reached.split() == [receiver]


def test_inhibitions_name_alerts() -> None:
    """A misspelt one would inhibit nothing."""
    for rule in yaml.safe_load(ALERTMANAGER.read_text())["inhibit_rules"]:
        matchers = [*rule["source_matchers"], *rule["target_matchers"]]
        named = [name for m in matchers for name in m.split('"')[1].split("|") if name != "Tandem.+"]
        assert set(named) <= set(alerts())
