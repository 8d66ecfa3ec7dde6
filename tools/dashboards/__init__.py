"""Grafana dashboards as code. `python -m tools.dashboards` writes the classic JSON that k8s/observability ships."""
