"""Parts of rendered manifests, to change them in place."""

from collections.abc import Callable
from typing import Any

from tests.deploy.checks import Check
from tests.deploy.manifests import Object, named

Mistake = tuple[str, Callable[[list[Object]], Any], Check, str]
"""The tree, what changes its objects, the check, and words of the problem that it must find."""


def pod(objects: list[Object], name: str) -> Object:
    return named(objects, "Deployment", name)["spec"]["template"]["spec"]


def container(objects: list[Object], name: str) -> Object:
    return pod(objects, name)["containers"][0]


def group(objects: list[Object]) -> Object:
    return named(objects, "LeaderWorkerSet", "verifier")["spec"]["leaderWorkerTemplate"]


def command_word(container: Object, old: str, new: str) -> None:
    container["command"][container["command"].index(old)] = new


def config(objects: list[Object], old: str, new: str) -> None:
    config_file(objects, "tandem.yaml", old, new)


def config_file(objects: list[Object], file: str, old: str, new: str) -> None:
    (data,) = (o["data"] for o in objects if o["kind"] == "ConfigMap" and file in o["data"])
    assert old in data[file]
    data[file] = data[file].replace(old, new)
