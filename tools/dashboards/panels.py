"""Panels, rows and dashboards, and their classic JSON (Grafana's schema 39: any Grafana from 10.4 on reads it)."""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
NO_TRAFFIC = "no traffic"
"""What a panel without values says: ratios have none while nothing happens."""
WIDTH = 24
"""Columns of a dashboard."""
_HEIGHTS = {"stat": 4, "timeseries": 8, "bargauge": 8, "table": 8}


@dataclass(frozen=True)
class Query:
    """PromQL. `$s` stands for the matcher of the chosen namespaces, `$i` for a rate's window."""

    expr: str
    legend: str = ""

    @property
    def promql(self) -> str:
        return self.expr.replace("$s", 'namespace=~"$namespace"').replace("$i", "[$__rate_interval]")


@dataclass(frozen=True)
class Panel:
    """One panel. A title says what, a description how to read it."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    thresholds: tuple[tuple[float | None, str], ...] = ((None, "green"),)
    """(from, colour), ascending; the first has None."""
    stacked: bool = False
    low: float | None = None
    """The axis' least and greatest value; None: by the data."""
    high: float | None = None
    decimals: int | None = None


@dataclass(frozen=True)
class Row:
    """A title with the panels below it, which are laid out from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A page."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    def to_json(self) -> Json:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["tandem"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": [
                {
                    "type": "dashboards",
                    "title": "Tandem",
                    "tags": ["tandem"],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "annotations": {"list": []},
            "templating": {"list": [_datasource_variable(), _namespace_variable()]},
            "panels": _laid_out(self.rows),
        }


def _datasource_variable() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }


def _namespace_variable() -> Json:
    query = "label_values(tandem_build_info, namespace)"
    return {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "namespace"},
        "refresh": 2,
        "sort": 1,
        "includeAll": True,
        # Also what has no such label: services outside of Kubernetes.
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _laid_out(rows: tuple[Row, ...]) -> list[Json]:
    """Left to right, a new line where the next panel would not fit."""
    panels: list[Json] = []
    y = 0
    for row in rows:
        header = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        panels.append({"id": len(panels) + 1, **header, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        y += 1
        x = tallest = 0
        for panel in row.panels:
            height = _HEIGHTS[panel.kind]
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            panels.append({"id": len(panels) + 1, **_panel(panel), "gridPos": place})
            x, tallest = x + panel.width, max(tallest, height)
        y += tallest
    return panels


def _panel(panel: Panel) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "noValue": NO_TRAFFIC,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": colour} for value, colour in panel.thresholds],
        },
    }
    limits = {"min": panel.low, "max": panel.high, "decimals": panel.decimals}
    defaults |= {key: value for key, value in limits.items() if value is not None}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "line" if len(panel.thresholds) > 1 else "off"},
        }
    instant = panel.kind != "timeseries"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": query.promql,
                "legendFormat": query.legend or "__auto",
                "instant": instant,
                "range": not instant,
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def _options(kind: str) -> Json:
    last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    match kind:
        case "stat":
            return {"reduceOptions": last, "colorMode": "value", "graphMode": "none", "textMode": "auto"}
        case "bargauge":
            return {"reduceOptions": last, "orientation": "horizontal", "displayMode": "basic", "showUnfilled": True}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def quantiles(metric: str, by: str = "", *shares: float) -> tuple[Query, ...]:
    """Of a histogram, one query per share; no value while nothing was observed. by: labels beside le."""
    labels = f"{by}, le" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        Query(
            f"histogram_quantile({s:g}, sum by ({labels}) (rate({metric}_bucket{{$s}}$i))) >= 0",
            f"p{s * 100:g}{legend}",
        )
        for s in shares
    )


def ratio(above: str, below: str, by: str = "") -> str:
    """above / below, each summed; no value where below is 0."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({above}) / (sum{grouping} ({below}) > 0)"
