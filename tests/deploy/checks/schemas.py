"""Every object against its schema, closed: a field that the API does not know is a problem."""

import functools
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.deploy.manifests import Object, of_kind

_CUSTOM = Path(__file__).parents[1] / "custom_resources.yaml"


def core_1_34(objects: list[Object]) -> list[str]:
    """Core kinds, strictly, for the oldest Kubernetes that is supported."""
    return _core(objects, "1.34")


def core_1_37(objects: list[Object]) -> list[str]:
    """And for the newest."""
    return _core(objects, "1.37")


def custom_resources(objects: list[Object]) -> list[str]:
    """Kinds that come with an operator. A kind without a schema is a problem."""
    problems = []
    for o in objects:
        if _is_core(o):
            continue
        schema = _custom_schemas().get(o["kind"])
        if schema is None:
            problems.append(f"{_name(o)}: no schema in {_CUSTOM.name}")
            continue
        errors = jsonschema.Draft202012Validator(schema).iter_errors(o)
        problems += [f"{_name(o)}: {error.json_path}: {error.message}" for error in errors]
    return problems


def _core(objects: list[Object], version: str) -> list[str]:
    problems = []
    for o in [*filter(_is_core, objects), *_pod_templates(objects)]:
        try:
            kubernetes_validate.validate(o, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            problems.append(f"{_name(o)}: {str(error).splitlines()[0]}")
    return problems


def _pod_templates(objects: list[Object]) -> list[Object]:
    """Of LeaderWorkerSets, as objects that Kubernetes knows."""
    found = []
    for o in of_kind(objects, "LeaderWorkerSet"):
        for key in ("leaderTemplate", "workerTemplate"):
            template = o["spec"]["leaderWorkerTemplate"][key]
            metadata = {"name": f"{o['metadata']['name']}-{key}"}
            found.append({"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": template})
    return found


def _is_core(o: Object) -> bool:
    """Of the API server itself. Operators' groups have dots too."""
    group = o["apiVersion"].rpartition("/")[0]
    return "." not in group or group == "networking.k8s.io"


@functools.cache
def _custom_schemas() -> dict[str, Any]:
    """By kind."""
    schemas = {}
    for kind, parts in yaml.safe_load(_CUSTOM.read_text())["kinds"].items():
        properties = {**parts, "apiVersion": {"const": parts["apiVersion"]}, "kind": {"const": kind}}
        schemas[kind] = _closed({"type": "object", "required": list(properties), "properties": properties})
    return schemas


def _closed(schema: Any) -> Any:
    """The schema, with no properties but those listed, at any depth."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(part) for key, part in schema.items()}
    # What lists properties may itself list one of the name `type`, but a schema's is text.
    if closed.get("type") == "object" and "properties" in closed:
        closed["additionalProperties"] = False
    return closed


def _name(o: Object) -> str:
    return f"{o['kind']} {o['metadata']['name']}"
