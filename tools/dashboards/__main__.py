"""Writes the dashboards to k8s/observability/dashboards."""

import json
from pathlib import Path

from tools.dashboards.overview import OVERVIEW
from tools.dashboards.panels import Dashboard
from tools.dashboards.speculation import SPECULATION
from tools.dashboards.verifier import VERIFIER

FOLDER = Path(__file__).parents[2] / "k8s" / "observability" / "dashboards"
DASHBOARDS = (OVERVIEW, SPECULATION, VERIFIER)


def text_of(dashboard: Dashboard) -> str:
    """The file's content."""
    return json.dumps(dashboard.to_json(), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.uid}.json").write_text(text_of(dashboard))


if __name__ == "__main__":
    main()
