"""What k8s/observability ships, as tests use it."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "k8s" / "observability"
RULES = sorted((FOLDER / "rules").glob("*.yml"))


@dataclass(frozen=True)
class Expression:
    """PromQL and where it is shipped. `$namespace` and `$__rate_interval` are still in it."""

    where: str
    promql: str

    def asked(self, namespace: str, window: str) -> str:
        """The query with the variables' values. namespace: a regular expression."""
        return self.promql.replace("$namespace", namespace).replace("$__rate_interval", window)


def panels() -> list[Expression]:
    """Of all dashboards."""
    found = []
    for file in sorted((FOLDER / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", []):
                found.append(Expression(f"{file.stem}: {panel['title']} {target['refId']}", target["expr"]))
    return found


def recorded() -> list[Expression]:
    """Series of the recording rules: they are asked for by name, so that it is Prometheus that evaluates the rule."""
    return [Expression(rule["record"], f'{rule["record"]}{{namespace=~"$namespace"}}') for rule in _rules("record")]


def alert_selectors() -> list[Expression]:
    """The vectors that alerts select. An alert itself has no value while all is well."""
    found = {}
    for rule in _rules("alert"):
        for name, matchers in re.findall(r"\b((?:tandem|process)[_:][\w:]+|up)\b(?:\{([^}]*)\})?", rule["expr"]):
            inside = ", ".join(filter(None, ['namespace=~"$namespace"', matchers]))
            found[f"{rule['alert']}: {name}{{{matchers}}}"] = f"{name}{{{inside}}}"
    return [Expression(where, promql) for where, promql in found.items()]


def alerts() -> list[str]:
    """Their names."""
    return [rule["alert"] for rule in _rules("alert")]


def write_config(folder: Path, targets: Mapping[tuple[str, str], int], interval: str) -> Path:
    """prometheus.yml with its rules, for pods that it would find at these ports of this machine.

    targets: port by (namespace, service). Only what finds the pods and how often is replaced; relabelling and rules are
    as shipped. Debian's Prometheus knows no Kubernetes.
    """
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    (job,) = config["scrape_configs"]
    del job["kubernetes_sd_configs"]
    job["static_configs"] = [
        {"targets": [f"127.0.0.1:{port}"], "labels": _found_by_kubernetes(namespace, service)}
        for (namespace, service), port in targets.items()
    ]
    (folder / "rules").mkdir()
    for file in RULES:
        text = re.sub(r"interval: \d+s", f"interval: {interval}", file.read_text())
        (folder / "rules" / file.name).write_text(text)
    shutil.copy(FOLDER / "alertmanager.yml", folder)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def _found_by_kubernetes(namespace: str, service: str) -> dict[str, str]:
    """Labels of the discovery's own, for a pod of base."""
    return {
        "__meta_kubernetes_namespace": namespace,
        "__meta_kubernetes_pod_name": f"{service}-0",
        "__meta_kubernetes_pod_node_name": "node",
        "__meta_kubernetes_pod_phase": "Running",
        "__meta_kubernetes_pod_container_port_name": "metrics",
        "__meta_kubernetes_pod_label_app_kubernetes_io_part_of": "tandem",
        "__meta_kubernetes_pod_label_app_kubernetes_io_name": service,
    }


def _rules(kind: str) -> Iterator[dict[str, Any]]:
    for file in RULES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            yield from (rule for rule in group["rules"] if kind in rule)
