"""Rendered manifests as containers for podman: of each Deployment's pods what a kubelet would give them.

A key that a kubelet would obey and this does not know is a ValueError, so that nothing is left out unseen. Probes,
hooks, resources and scheduling are left out on purpose: one machine is no cluster.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]

_POD = {
    *("containers", "volumes", "securityContext", "terminationGracePeriodSeconds"),
    *("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks"),
    *("affinity", "tolerations", "topologySpreadConstraints"),
}
_CONTAINER = {
    *("name", "image", "command", "args", "env", "securityContext", "volumeMounts"),
    *("imagePullPolicy", "ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"),
    *("resources", "terminationMessagePolicy"),
}
_POD_SECURITY = {"runAsNonRoot", "runAsUser", "runAsGroup", "seccompProfile"}
_CONTAINER_SECURITY = {"allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"}


@dataclass(frozen=True)
class PodContainer:
    """One pod's only container."""

    name: str
    """Deployment and number: gateway-0."""
    image: str
    options: list[str]
    """Of `podman run`, before the image."""
    command: list[str]
    """After it."""
    hosts: list[str]
    """Services that lead to it."""
    readiness: tuple[int, str]
    """Port and service that its readiness probe asks."""


def pod_containers(objects: list[Object], folder: Path, claims: Mapping[str, Path]) -> list[PodContainer]:
    """Containers of all Deployments. ConfigMaps are written below `folder`; `claims` are folders by claim."""
    for o in _of_kind(objects, "ConfigMap"):
        for file, text in o["data"].items():
            path = folder / o["metadata"]["name"] / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return [
        _container(objects, owner, number, folder, claims)
        for owner in _of_kind(objects, "Deployment")
        for number in range(owner["spec"]["replicas"])
    ]


def _container(
    objects: list[Object], owner: Object, number: int, folder: Path, claims: Mapping[str, Path]
) -> PodContainer:
    template = owner["spec"]["template"]
    spec = template["spec"]
    _known(spec, _POD, "pod")
    (container,) = spec["containers"]
    _known(container, _CONTAINER, "container")
    program, *arguments = [*container.get("command", []), *container.get("args", [])]
    options = [
        *_security(spec.get("securityContext", {}), container.get("securityContext", {})),
        *(f"--env={e['name']}={e['value']}" for e in container.get("env", [])),
        *_mounts(spec.get("volumes", []), container.get("volumeMounts", []), folder, claims),
        f"--stop-timeout={spec.get('terminationGracePeriodSeconds', 30)}",
        f"--entrypoint={json.dumps([program])}",
    ]
    labels = template["metadata"]["labels"]
    probe = container["readinessProbe"]["grpc"]
    return PodContainer(
        name=f"{owner['metadata']['name']}-{number}",
        image=container["image"],
        options=options,
        command=arguments,
        hosts=[
            o["metadata"]["name"]
            for o in _of_kind(objects, "Service")
            if o["spec"]["selector"].items() <= labels.items()
        ],
        readiness=(probe["port"], probe.get("service", "")),
    )


def _security(pod: Object, container: Object) -> Iterator[str]:
    _known(pod, _POD_SECURITY, "pod's securityContext")
    _known(container, _CONTAINER_SECURITY, "container's securityContext")
    if "runAsUser" in pod:
        yield f"--user={pod['runAsUser']}:{pod.get('runAsGroup', 0)}"
    if container.get("readOnlyRootFilesystem"):
        # Without podman's own tmpfs on /tmp and /run, which no kubelet mounts.
        yield from ("--read-only", "--read-only-tmpfs=false")
    if container.get("allowPrivilegeEscalation") is False:
        yield "--security-opt=no-new-privileges"
    yield from (f"--cap-drop={capability}" for capability in container.get("capabilities", {}).get("drop", []))


def _mounts(volumes: list[Object], mounts: list[Object], folder: Path, claims: Mapping[str, Path]) -> Iterator[str]:
    sources = {volume["name"]: volume for volume in volumes}
    for mount in mounts:
        _known(mount, {"name", "mountPath", "readOnly"}, "mount")
        source, path = sources[mount["name"]], mount["mountPath"]
        mode = "ro" if mount.get("readOnly") else "rw"
        match source:
            case {"configMap": {"name": name}}:
                yield f"--volume={folder / name}:{path}:ro"
            case {"persistentVolumeClaim": {"claimName": name}}:
                yield f"--volume={claims[name]}:{path}:{mode}"
            case {"emptyDir": empty}:
                # As a kubelet makes it: all may write, and what is written may be run.
                limit = f",size={_bytes(empty['sizeLimit'])}" if "sizeLimit" in empty else ""
                yield f"--tmpfs={path}:rw,exec,nosuid,nodev,mode=1777{limit}"
            case _:
                raise ValueError(f"volume {mount['name']}: of a kind that is not known here")


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[quantity[-2:]]


def _known(part: Object, keys: set[str], where: str) -> None:
    if unknown := part.keys() - keys:
        raise ValueError(f"{where}: {', '.join(sorted(unknown))} is not known here")


def _of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [o for o in objects if o["kind"] == kind]
