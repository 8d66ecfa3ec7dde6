"""k8s/observability renders to what a monitoring stack takes: nothing left out, nothing changed on the way."""

import json
from pathlib import Path

from tests.deploy.checks import schemas
from tests.deploy.manifests import K8S, Object, kustomize, named, of_kind

FOLDER = K8S / "observability"
MOST_BYTES = 2**20
"""Of a ConfigMap, by Kubernetes."""


def _objects() -> list[Object]:
    return kustomize(FOLDER)


def _files(pattern: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in FOLDER.glob(pattern)}


def test_config_maps_hold_the_files() -> None:
    wanted = {
        "tandem-dashboards": "dashboards/*.json",
        "tandem-prometheus": "prometheus.yml",
        "tandem-prometheus-rules": "rules/*.yml",
        "tandem-alertmanager": "alertmanager.yml",
    }
    objects = _objects()
    assert {o["metadata"]["name"] for o in of_kind(objects, "ConfigMap")} == wanted.keys()
    assert len(objects) == len(wanted)
    for name, pattern in wanted.items():
        data = named(objects, "ConfigMap", name)["data"]
        assert data == _files(pattern)
        assert len(json.dumps(data)) < MOST_BYTES


def test_config_maps_are_of_kubernetes() -> None:
    assert schemas.core_1_34(_objects()) == schemas.core_1_37(_objects()) == []


def test_dashboards_are_found_by_grafanas_sidecar() -> None:
    """It looks for the label. Without a hash in the name a changed dashboard replaces the old one."""
    metadata = named(_objects(), "ConfigMap", "tandem-dashboards")["metadata"]
    assert metadata["labels"]["grafana_dashboard"] == "1"
    assert metadata["annotations"]["grafana_folder"] == "Tandem"


def test_rules_are_where_prometheus_looks() -> None:
    """prometheus.yml names a folder beside it, into which docs/metrics.md has the rules mounted."""
    assert "rule_files:\n  - rules/*.yml\n" in (FOLDER / "prometheus.yml").read_text()
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert "`/etc/prometheus/rules`" in page
