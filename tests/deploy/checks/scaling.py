"""How many there are, where they are, and what watches them."""

import re

from prometheus_client import CollectorRegistry

from drafter_service.metrics import DrafterMetrics
from gateway.metrics import GatewayMetrics
from tests.deploy.checks.network import ports_of
from tests.deploy.manifests import Object, of_kind, selects, tandem_workloads, workloads
from verifier_service.metrics import VerifierMetrics

_HASHES = {"Deployment": "pod-template-hash", "StatefulSet": "controller-revision-hash"}
"""The label by which pods of one rollout differ from others'."""


def disruption_budgets_allow_one(objects: list[Object]) -> list[str]:
    """A node can always be drained: whatever the number of replicas, one may go, also one that is not ready."""
    problems = []
    budgets = of_kind(objects, "PodDisruptionBudget")
    for o in budgets:
        name, spec = o["metadata"]["name"], o["spec"]
        if spec.get("maxUnavailable") != 1 or "minAvailable" in spec:
            problems.append(f"PodDisruptionBudget {name}: must be maxUnavailable 1")
        if spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            problems.append(f"PodDisruptionBudget {name}: a pod that is not ready cannot be evicted")
    for w in tandem_workloads(objects):
        if w.pods != 1 and w.serves and sum(selects(o["spec"]["selector"], w.labels) for o in budgets) != 1:
            problems.append(f"{w.name}: several pods need one PodDisruptionBudget")
    return problems


def autoscalers_own_replicas(objects: list[Object]) -> list[str]:
    """What an autoscaler scales is there and sets no replicas; what none scales does."""
    problems = []
    scaled = {}
    for o in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        name, spec = f"{o['kind']} {o['metadata']['name']}", o["spec"]
        suffix = "Count" if o["kind"] == "ScaledObject" else "s"
        low, high = spec.get(f"minReplica{suffix}", 0), spec.get(f"maxReplica{suffix}", 0)
        if not 1 <= low < high:
            problems.append(f"{name}: from {low} to {high} replicas")
        scaled[spec["scaleTargetRef"]["name"]] = name
    deployments = {o["metadata"]["name"]: o for o in of_kind(objects, "Deployment")}
    for target, name in scaled.items():
        if target not in deployments:
            problems.append(f"{name}: no Deployment {target}")
    for target, o in deployments.items():
        if ("replicas" in o["spec"]) == (target in scaled):
            problems.append(f"Deployment {target}: replicas must be set by it or by an autoscaler")
    return problems


def pods_of_a_rollout_spread(objects: list[Object]) -> list[str]:
    """matchLabelKeys is the label that the kind of owner sets; several gateways are spread over nodes."""
    problems = []
    for w in workloads(objects):
        constraints = w.spec.get("topologySpreadConstraints", [])
        for constraint in constraints:
            if constraint.get("matchLabelKeys") != [_HASHES.get(w.owner["kind"])]:
                problems.append(f"{w.name}: pods of a {w.owner['kind']} have no {constraint.get('matchLabelKeys')}")
        if w.module == "gateway" and "kubernetes.io/hostname" not in [c["topologyKey"] for c in constraints]:
            problems.append(f"{w.name}: is not spread over nodes")
    return problems


def monitors_scrape(objects: list[Object]) -> list[str]:
    """Monitors name ports that the pods, or the Service, have; if there are any, all services are scraped."""
    problems = []
    scraped = set()
    for o in of_kind(objects, "PodMonitor"):
        for w in tandem_workloads(objects):
            if w.serves and selects(o["spec"]["selector"], w.labels):
                scraped.add(w.name)
                asked = {endpoint["port"] for endpoint in o["spec"]["podMetricsEndpoints"]}
                wrong = asked - ({"metrics"} & ports_of(w).keys())
                problems += [f"PodMonitor {o['metadata']['name']}: {w.name} serves no metrics at {p}" for p in wrong]
    for o in of_kind(objects, "ServiceMonitor"):
        for service in of_kind(objects, "Service"):
            if not selects(o["spec"]["selector"], service["metadata"].get("labels", {})):
                continue
            targets = {p["name"]: p.get("targetPort") for p in service["spec"]["ports"]}
            behind = {"matchLabels": service["spec"]["selector"]}
            scraped |= {w.name for w in tandem_workloads(objects) if selects(behind, w.labels)}
            for endpoint in o["spec"]["endpoints"]:
                if targets.get(endpoint["port"]) != "metrics":
                    problems.append(f"ServiceMonitor {o['metadata']['name']}: no metrics at {endpoint['port']}")
    missing = {w.name for w in tandem_workloads(objects) if w.serves} - scraped if scraped else set()
    return problems + [f"{name}: is not scraped" for name in missing]


def queries_name_metrics(objects: list[Object]) -> list[str]:
    """Queries of autoscalers name metrics that the code exports, of the namespace they are in."""
    problems = []
    for o in of_kind(objects, "ScaledObject"):
        name, namespace = o["metadata"]["name"], o["metadata"].get("namespace", "tandem")
        for trigger in o["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            asked = set(re.findall(r"\btandem_\w+", query))
            if not asked:
                problems.append(f"ScaledObject {name}: asks for no metric of Tandem")
            problems += [f"ScaledObject {name}: no metric {metric}" for metric in asked - _exported()]
            if set(re.findall(r'namespace="([^"]*)"', query)) != {namespace}:
                problems.append(f"ScaledObject {name}: must ask about namespace {namespace}")
    return problems


def _exported() -> set[str]:
    """Names of all samples."""
    registry = CollectorRegistry()
    for metrics in (DrafterMetrics, GatewayMetrics, VerifierMetrics):
        metrics(registry)
    names = set()
    for family in registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names
