"""Metrics, their page, rules, dashboards, runbooks and queries of autoscalers say the same."""

import inspect
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

import gateway.servicer
from drafter_service.metrics import DrafterMetrics
from gateway.metrics import GatewayMetrics
from tandem.errors import InvalidRequest, Overloaded, Unavailable
from tandem.graphs import Fallback
from tandem.metrics import new_registry
from tandem.rpc import to_status
from tandem.v1 import generation_pb2
from tools import metrics_catalogue, prometheus_rule
from tools.dashboards.__main__ import DASHBOARDS, FOLDER, text_of
from tools.dashboards.panels import NO_TRAFFIC, WIDTH
from tools.metrics_catalogue import PROCESS_METRICS, alerts, catalogue, recorded
from verifier_service.metrics import VerifierMetrics

ROOT = Path(__file__).parents[2]
UNITS = {"short", "s", "percentunit", "bytes", "Bps", "reqps", "bool_yes_no"}
FROM_PROMETHEUS = {"up"}
OF_TARGETS = {"namespace", "job", "instance"}
"""Labels that scraping adds."""

LATER = {"tandem_graph_replays_total", "tandem_graph_replay_seconds_total", "tandem_drafter_graph_replays_total"}
"""Their label is a capacity, which only those that run have."""


def _panels() -> Iterator[dict[str, Any]]:
    for dashboard in DASHBOARDS:
        yield from (panel for panel in dashboard.to_json()["panels"] if panel["type"] != "row")


def _expressions() -> dict[str, str]:
    """All PromQL that is shipped, by where it is."""
    found = {f"record {name}": expr for name, expr in recorded().items()}
    found |= {f"alert {rule['alert']}": rule["expr"] for rule in alerts()}
    for dashboard in DASHBOARDS:
        for panel in dashboard.to_json()["panels"]:
            for target in panel.get("targets", []):
                found[f"panel {dashboard.uid} {panel['id']}{target['refId']} {panel['title']}"] = target["expr"]
    (trigger,) = yaml.safe_load((ROOT / "k8s/components/autoscaling/drafter.yaml").read_text())["spec"]["triggers"]
    return found | {"autoscaling": trigger["metadata"]["query"]}


EXPRESSIONS = _expressions()
CATALOGUE = catalogue()


def _selectors(expr: str) -> Iterator[tuple[str, str]]:
    """(metric, its matchers) of each vector that an expression selects."""
    yield from re.findall(r"\b((?:tandem|process)[_:][\w:]+|up)\b(?:\{([^}]*)\})?", expr)


def test_page_is_fresh() -> None:
    """`make metrics-doc` writes it."""
    assert metrics_catalogue.PAGE.read_text() == metrics_catalogue.page()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda d: d.uid)
def test_dashboard_is_fresh(dashboard: Any) -> None:
    assert (FOLDER / f"{dashboard.uid}.json").read_text() == text_of(dashboard)


def test_operators_rules_are_fresh() -> None:
    """What a Prometheus without the operator loads and what the operator is given is the same."""
    assert prometheus_rule.OBJECT.read_text() == prometheus_rule.text()
    groups = itertools.chain.from_iterable(yaml.safe_load(f.read_text())["groups"] for f in prometheus_rule.RULES)
    assert yaml.safe_load(prometheus_rule.OBJECT.read_text())["spec"]["groups"] == list(groups)


def test_every_metric_is_used_and_explained() -> None:
    """And nothing is explained that is not there."""
    assert {entry.name for entry in CATALOGUE} == metrics_catalogue.uses().keys()
    assert all(entry.text for entry in CATALOGUE)
    assert all(metrics_catalogue.uses().values())


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_expression_names_metrics_that_exist(where: str) -> None:
    """With the labels that they have."""
    labels = {sample: {*e.labels, *OF_TARGETS, "le"} for e in CATALOGUE for sample in e.samples}
    labels |= dict.fromkeys((*PROCESS_METRICS, *FROM_PROMETHEUS), OF_TARGETS)
    labels |= {name: {"namespace", "kind"} for name in recorded()}
    selectors = list(_selectors(EXPRESSIONS[where]))
    assert selectors
    for name, matchers in selectors:
        assert name in labels
        assert set(re.findall(r"(\w+)\s*(?:=|!)", matchers)) <= labels[name], name


def test_metrics_named_in_documents_exist() -> None:
    known = {name for e in CATALOGUE for name in (e.name, e.name.removesuffix("_total"), *e.samples)}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        named = set(re.findall(r"\btandem_[a-z0-9_]+", page.read_text()))
        assert {n for n in named if not n.endswith("_")} <= known | {"tandem_build_info"}, page


def test_series_are_there_from_the_start() -> None:
    """Else the first event of a kind is in no rate."""
    registry = CollectorRegistry()
    GatewayMetrics(registry).observe(lambda: 0, lambda: 0, lambda: 0)
    DrafterMetrics(registry)
    verifier = VerifierMetrics(registry)
    verifier.set_ranks(8)
    verifier.expect_positions(7)
    have = {sample.name for metric in registry.collect() for sample in metric.samples}
    of_load = {"tandem_num_requests", "tandem_kv_blocks", "tandem_drafters", "tandem_spec_gain", "tandem_spec_asked"}
    missing = {name for e in CATALOGUE for name in e.samples} - have - LATER - {"tandem_build_info"}
    assert {name for name in missing if not name.startswith((*of_load, "tandem_graph_buckets"))} == set()


def test_every_service_says_what_it_is() -> None:
    registry = new_registry("gateway")
    names = {sample.name for metric in registry.collect() for sample in metric.samples}
    assert names == {"tandem_build_info", *PROCESS_METRICS}


def test_labels_are_bounded() -> None:
    """None is of a request, a client or a sequence."""
    allowed = {"service", "version", "method", "code", "position", "reason", "source", "finish_reason", "kind", "what"}
    allowed |= {"mode", "rank", "captured", "rows", "requests"}
    assert {label for entry in CATALOGUE for label in entry.labels} <= allowed


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alert_is_complete(rule: dict[str, Any]) -> None:
    """It says how bad it is, what is wrong, and what to do."""
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    name = rule["alert"]
    assert rule["annotations"]["runbook_url"].endswith(f"/docs/runbooks/{name}.md")
    runbook = (ROOT / "docs" / "runbooks" / f"{name}.md").read_text()
    assert runbook.startswith(f"# {name}\n")
    assert all((ROOT / "docs" / "runbooks" / link).is_file() for link in re.findall(r"\]\((\w+\.md)\)", runbook))


def test_every_runbook_has_its_alert() -> None:
    assert {path.stem for path in (ROOT / "docs" / "runbooks").iterdir()} == {rule["alert"] for rule in alerts()}


def test_panels_named_in_documents_exist() -> None:
    """Runbooks and the page of metrics send people to panels."""
    titles = {panel["title"] for panel in _panels()}
    for runbook in (ROOT / "docs" / "runbooks").iterdir():
        for line in re.sub(r"\s+", " ", runbook.read_text()).split(" - "):
            if line.startswith("The panel"):
                assert set(re.findall(r'"([^"]+)"', line.partition(":")[0])) <= titles, runbook
    questions = metrics_catalogue.PAGE.read_text().partition("## Questions")[2].partition("## All")[0]
    assert set(re.findall(r'"([^"]+)"', questions)) <= titles


def test_runbooks_name_keys_that_exist() -> None:
    from tandem.config import StackConfig

    def keys(model: Any, prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            yield prefix + name
            if hasattr(field.annotation, "model_fields"):
                yield from keys(field.annotation, f"{prefix}{name}.")

    known = set(keys(StackConfig, ""))
    for path in ((ROOT / "docs" / "runbooks").glob("*.md"), [metrics_catalogue.PAGE]):
        for page in path:
            named = re.findall(r"\b((?:gateway|verifier|drafter)\.[a-z_]+(?:\.[a-z_]+)*)", page.read_text())
            assert set(named) <= known, page


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda d: d.uid)
def test_dashboard_is_sound(dashboard: Any) -> None:
    """Panels have ids of their own, do not overlap, ask the chosen data source, and say what they show and in what."""
    data = json.loads(text_of(dashboard))
    assert [v["name"] for v in data["templating"]["list"]] == ["datasource", "namespace"]
    ids = [panel["id"] for panel in data["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in data["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        mine = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not mine & cells, panel["title"]
        cells |= mine
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["fieldConfig"]["defaults"]["noValue"] == NO_TRAFFIC
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("where", [w for w in EXPRESSIONS if w.startswith("panel")])
def test_panel_keeps_to_the_chosen_namespaces(where: str) -> None:
    for name, matchers in _selectors(EXPRESSIONS[where]):
        assert 'namespace=~"$namespace"' in matchers, name


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_counters_are_looked_at_by_their_rate(where: str) -> None:
    """A counter itself says how long the process has run. And what is summed is rates, not the other way round."""
    expr = EXPRESSIONS[where]
    counters = {s for e in CATALOGUE for s in e.samples if e.kind in ("counter", "histogram")}
    for name in counters:
        for found in re.finditer(rf"\b{name}\b", expr):
            assert re.search(r"(rate|increase)\s*\($", expr[: found.start()]), name
    assert not re.search(r"(rate|increase)\s*\(\s*sum", expr)


def test_titles_are_unique() -> None:
    for dashboard in DASHBOARDS:
        titles = [(p["title"], p["type"]) for p in dashboard.to_json()["panels"]]
        assert len(titles) == len(set(titles))


def test_dashboards_have_uids_of_their_own() -> None:
    assert len({d.uid for d in DASHBOARDS} | {d.title for d in DASHBOARDS}) == 2 * len(DASHBOARDS)


def test_calls_are_counted_from_the_start() -> None:
    """All methods of the service, and all statuses that its calls can end with."""
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    (family,) = (f for f in registry.collect() if f.name == "tandem_gateway_requests")
    methods = {method.name for method in generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods}
    assert {sample.labels["method"] for sample in family.samples} == methods
    named = re.findall(r"StatusCode\.([A-Z_]+)", inspect.getsource(gateway.servicer))
    domain = [to_status(e).code.name for e in (InvalidRequest(), Overloaded("", 1.0), Unavailable(""))]
    assert {sample.labels["code"] for sample in family.samples} == {*named, *domain}


def test_fallbacks_are_counted_from_the_start() -> None:
    """By all reasons that a step can have. A drafter has a bucket for whatever comes."""
    wanted = {fallback.value for fallback in Fallback}
    for metrics, more in ((VerifierMetrics, {"no_bucket"}), (DrafterMetrics, set[str]())):
        registry = CollectorRegistry()
        metrics(registry)
        (family,) = (f for f in registry.collect() if f.name.endswith("graph_fallbacks"))
        assert {sample.labels["reason"] for sample in family.samples} == wanted | more
