"""All metrics that the services export, and docs/metrics.md made of them. `make metrics-doc` runs it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from drafter_service.metrics import DrafterMetrics
from gateway.metrics import GatewayMetrics
from tandem.metrics import new_registry
from verifier_service.load import Load
from verifier_service.metrics import VerifierMetrics

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
RULES = sorted((ROOT / "k8s" / "observability" / "rules").glob("*.yml"))
PROCESS_METRICS = (
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
)
"""Of every service, by prometheus_client."""
_UNITS = ("seconds", "bytes", "tokens", "blocks", "rows")
_HEADER = (Path(__file__).parent / "metrics_page.md").read_text()


@dataclass(frozen=True)
class Entry:
    """One metric."""

    name: str
    """As it is exposed; of a histogram without _bucket, _sum and _count."""
    kind: str
    labels: tuple[str, ...]
    text: str
    service: str

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of its samples."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))

    @property
    def unit(self) -> str:
        words = self.name.split("_")
        return next((unit for unit in _UNITS if unit in words), "")


class _Metrics(CollectorRegistry):
    """Remembers what registers."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[MetricWrapperBase] = []

    def register(self, collector: Any) -> None:
        super().register(collector)
        self.registered.append(collector)


def catalogue() -> list[Entry]:
    """By service, in the order of the code. What all services have has the service `all`."""
    found: dict[str, list[Entry]] = {}
    for service, metrics in (("gateway", _gateway), ("verifier", _verifier), ("drafter", _drafter)):
        registry = _Metrics()
        metrics(registry)
        found[service] = [_entry(metric, service) for metric in registry.registered]
    (build_info,) = (f for f in new_registry("any").collect() if f.name == "tandem_build_info")
    labels = tuple(build_info.samples[0].labels)
    of_all = Entry(build_info.name, build_info.type, labels, build_info.documentation, "all")
    return [of_all, *(entry for entries in found.values() for entry in entries)]


def recorded() -> dict[str, str]:
    """Series of the recording rules, with their expressions."""
    return {rule["record"]: rule["expr"] for rule in _rules() if "record" in rule}


def alerts() -> list[dict[str, Any]]:
    """The alerting rules."""
    return [rule for rule in _rules() if "alert" in rule]


def uses() -> dict[str, str]:
    """How each metric is used."""
    found: dict[str, str] = yaml.safe_load((Path(__file__).parent / "metric_uses.yaml").read_text())
    return found


def page() -> str:
    """docs/metrics.md."""
    entries, used = catalogue(), uses()
    odd = {entry.name for entry in entries} ^ used.keys()
    if odd:
        raise SystemExit(
            f"tools/metric_uses.yaml: must have the metrics of the code, differs by {', '.join(sorted(odd))}"
        )
    parts = [_HEADER.rstrip()]
    for service, title in (
        ("all", "All services"),
        ("gateway", "Gateway"),
        ("verifier", "Verifier (rank 0 for all ranks)"),
        ("drafter", "Drafter"),
    ):
        rows = [_row(entry, used[entry.name]) for entry in entries if entry.service == service]
        parts.append(
            "\n".join([f"## {title}\n", "| metric | type | labels | unit | what | use |", "|---" * 6 + "|", *rows])
        )
    lines = ["## Recorded series\n", "| series | expression |", "|---|---|"]
    lines += [f"| `{name}` | `{_in_cell(expr)}` |" for name, expr in recorded().items()]
    parts.append("\n".join(lines))
    lines = ["## Alerts\n", "| alert | severity | expression, for | runbook |", "|---" * 4 + "|"]
    for rule in alerts():
        name, lasts = rule["alert"], f", {rule['for']}" if "for" in rule else ""
        cells = [
            f"`{name}`",
            rule["labels"]["severity"],
            f"`{_in_cell(rule['expr'])}`{lasts}",
            f"[runbook](runbooks/{name}.md)",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _gateway(registry: CollectorRegistry) -> None:
    GatewayMetrics(registry).observe(lambda: 0, lambda: 0, lambda: 0)


def _verifier(registry: CollectorRegistry) -> None:
    VerifierMetrics(registry).observe_load(_no_load)


def _drafter(registry: CollectorRegistry) -> None:
    DrafterMetrics(registry)


def _no_load() -> Load:
    raise AssertionError("read by a scrape only")


def _entry(metric: MetricWrapperBase, service: str) -> Entry:
    # There is no public way to ask a metric without children for its labels.
    (described,) = metric.describe()
    name = described.name + ("_total" if described.type == "counter" else "")
    return Entry(name, described.type, tuple(metric._labelnames), described.documentation, service)


def _rules() -> Iterator[dict[str, Any]]:
    for file in RULES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            yield from group["rules"]


def _row(entry: Entry, use: str) -> str:
    labels = ", ".join(f"`{label}`" for label in entry.labels)
    cells = (f"`{entry.name}`", entry.kind, labels, entry.unit, entry.text, use)
    return f"| {' | '.join(cells)} |"


def _in_cell(expr: str) -> str:
    """On one line, and without ending the table's cell."""
    return " ".join(expr.split()).replace("|", "\\|")


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
