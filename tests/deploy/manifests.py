"""The manifests as objects: rendered trees, the pods in them, and the config that a pod reads."""

import functools
import itertools
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem.config import StackConfig, load_config

Object = dict[str, Any]

K8S = Path(__file__).parents[2] / "k8s"
SERVING = ["demo-cpu", "kimi-k2-ep8", "multi-node"]
"""Overlays that serve."""
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
VERSION = tomllib.loads((K8S.parent / "pyproject.toml").read_text())["project"]["version"]
MODULES = {"gateway": "gateway", "verifier_service": "verifier", "drafter_service": "drafter"}
"""Section of the config by the module that runs."""


class BrokenConfigError(Exception):
    """A pod would not find its config, or not understand it."""


@functools.cache
def render(tree: str) -> list[Object]:
    """What kustomize makes of base, of an overlay, or of base and a component (`base+monitoring`). Do not change it."""
    name, _, component = tree.partition("+")
    if not component:
        return kustomize(K8S / "base" if name == "base" else K8S / "overlays" / name)
    with tempfile.TemporaryDirectory() as folder:
        kustomization = {
            "resources": [os.path.relpath(K8S / "base", folder)],
            "components": [os.path.relpath(K8S / "components" / component, folder)],
            # As overlays do: base's tags are for what base itself has.
            "images": [{"name": name, "newTag": VERSION} for name in ("tandem-gateway", "tandem-worker")],
        }
        Path(folder, "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return kustomize(Path(folder))


def kustomize(folder: Path) -> list[Object]:
    """The objects of a kustomization."""
    kubectl = Path(sys.executable).parent / "kubectl"
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60)
    # Kustomize says there what is deprecated.
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


@dataclass(frozen=True)
class Workload:
    """Pods of one template."""

    name: str
    owner: Object
    template: Object
    pods: int | None
    """How many; None: an autoscaler says."""
    command: list[str]
    """Of the only container."""

    @property
    def spec(self) -> Object:
        return self.template["spec"]

    @property
    def container(self) -> Object:
        return self.spec["containers"][0]

    @property
    def labels(self) -> dict[str, str]:
        return self.template.get("metadata", {}).get("labels", {})

    @property
    def module(self) -> str | None:
        """Of Tandem, that it runs; None for jobs."""
        named = [after for flag, after in zip(self.command, self.command[1:], strict=False) if flag == "-m"]
        return next((module for module in named if module in MODULES), None)

    @property
    def serves(self) -> bool:
        """False for the ranks behind rank 0, and for jobs."""
        return self.module is not None and not self.name.endswith("worker")

    @property
    def gpus(self) -> int:
        return int(self.container["resources"]["limits"].get("nvidia.com/gpu", 0))


def named(objects: list[Object], kind: str, name: str) -> Object:
    """The one object of that kind and name."""
    (found,) = (o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name)
    return found


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [o for o in objects if o["kind"] in kinds]


def workloads(objects: list[Object]) -> list[Workload]:
    """Of all kinds that have pods. A LeaderWorkerSet has two: leader and worker."""
    found = []
    for owner in objects:
        for part, template, pods in _templates(owner):
            (container,) = template["spec"]["containers"]
            name = " ".join([owner["kind"], owner["metadata"]["name"], *part])
            found.append(Workload(name, owner, template, pods, container.get("command", [])))
    return found


def tandem_workloads(objects: list[Object]) -> list[Workload]:
    """Those that run one of Tandem's services."""
    return [w for w in workloads(objects) if w.module]


def _templates(owner: Object) -> Iterator[tuple[list[str], Object, int | None]]:
    match owner["kind"]:
        case "Deployment":
            yield [], owner["spec"]["template"], owner["spec"].get("replicas")
        case "Job":
            yield [], owner["spec"]["template"], 1
        case "Pod":
            yield [], owner, 1
        case "LeaderWorkerSet":
            groups, template = owner["spec"]["replicas"], owner["spec"]["leaderWorkerTemplate"]
            yield ["leader"], template["leaderTemplate"], groups
            yield ["worker"], template["workerTemplate"], groups * (template["size"] - 1)


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector (matchLabels only) matches."""
    return selector.get("matchLabels", {}).items() <= labels.items()


def mount_of(workload: Workload, path: str) -> tuple[Object, Object] | None:
    """The mount and the volume that a path of the container lies in."""
    volumes = {volume["name"]: volume for volume in workload.spec.get("volumes", [])}
    for mount in workload.container.get("volumeMounts", []):
        if Path(path).is_relative_to(mount["mountPath"]) and mount["name"] in volumes:
            return mount, volumes[mount["name"]]
    return None


def config_texts(objects: list[Object], workload: Workload) -> tuple[str, ...]:
    """The config files that a pod reads, in order. BrokenConfigError if one is not there."""
    command = workload.command
    paths = [path for flag, path in itertools.pairwise(command) if flag == "--config"]
    return tuple(_config_text(objects, workload, path) for path in paths)


def _config_text(objects: list[Object], workload: Workload, path: str) -> str:
    _, volume = mount_of(workload, path) or ({}, {})
    name = volume.get("configMap", {}).get("name")
    maps = [o for o in of_kind(objects, "ConfigMap") if o["metadata"]["name"] == name]
    if not maps or Path(path).name not in maps[0]["data"]:
        raise BrokenConfigError(f"{workload.name}: {path} is in no ConfigMap that is mounted")
    return str(maps[0]["data"][Path(path).name])


def config_of(objects: list[Object], workload: Workload) -> StackConfig:
    """The config that a pod reads, loaded as the service would. BrokenConfigError if it could not."""
    texts = config_texts(objects, workload)
    try:
        return _load(*texts)
    except Exception as error:
        raise BrokenConfigError(f"{workload.name}: {error}") from None


@functools.cache
def _load(text: str, *more: str) -> StackConfig:
    """With an empty config.json where the models would be, since a config names folders that exist."""
    data = yaml.safe_load(text)
    with tempfile.TemporaryDirectory() as folder:
        for key in {"target", "draft_model"} & data.keys():
            model = Path(folder, Path(data[key]).relative_to("/"))
            model.mkdir(parents=True, exist_ok=True)
            (model / "config.json").write_text("{}")
            data[key] = str(model)
        files = [Path(folder, f"{number}.yaml") for number in range(1 + len(more))]
        for file, content in zip(files, (yaml.safe_dump(data), *more), strict=True):
            file.write_text(content)
        return load_config(*files)
