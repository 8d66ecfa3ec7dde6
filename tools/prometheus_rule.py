"""The rules of k8s/observability as a PrometheusRule, for the operator. `make metrics-doc` runs it."""

from pathlib import Path

K8S = Path(__file__).parents[1] / "k8s"
RULES = sorted((K8S / "observability" / "rules").glob("*.yml"))
OBJECT = K8S / "components" / "monitoring" / "rules.yaml"

_HEAD = """\
# Made from k8s/observability/rules by `make metrics-doc`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tandem
spec:
  groups:
"""


def text() -> str:
    """The object's file. Groups keep their comments and their form."""
    lines = [line for file in RULES for line in file.read_text().partition("groups:\n")[2].splitlines()]
    return _HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines)


def main() -> None:
    OBJECT.write_text(text())


if __name__ == "__main__":
    main()
