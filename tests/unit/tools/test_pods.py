"""Rendered manifests become what a kubelet would make of them: nothing is added, and nothing left out unseen."""

import copy
from pathlib import Path
from typing import Any

import pytest

from tools.pods import PodContainer, pod_containers

CLAIMS = {"models": Path("/data")}


def deployment() -> dict[str, Any]:
    return {
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 2,
            "template": {
                "metadata": {"labels": {"app": "web", "tier": "front"}},
                "spec": {
                    "terminationGracePeriodSeconds": 7,
                    "securityContext": {"runAsUser": 5, "runAsGroup": 6},
                    "containers": [
                        {
                            "name": "web",
                            "image": "example.com/web:1",
                            "command": ["run", "-m"],
                            "args": ["web"],
                            "env": [{"name": "HOME", "value": "/cache"}],
                            "readinessProbe": {"grpc": {"port": 9, "service": "Web"}},
                            "securityContext": {
                                "readOnlyRootFilesystem": True,
                                "allowPrivilegeEscalation": False,
                                "capabilities": {"drop": ["ALL"]},
                            },
                            "volumeMounts": [
                                {"name": "config", "mountPath": "/etc/web", "readOnly": True},
                                {"name": "models", "mountPath": "/models", "readOnly": True},
                                {"name": "cache", "mountPath": "/cache"},
                            ],
                        }
                    ],
                    "volumes": [
                        {"name": "config", "configMap": {"name": "web-1"}},
                        {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
                        {"name": "cache", "emptyDir": {"sizeLimit": "2Mi"}},
                    ],
                },
            },
        },
    }


def containers(folder: Path, owner: dict[str, Any]) -> list[PodContainer]:
    objects = [
        {"kind": "ConfigMap", "metadata": {"name": "web-1"}, "data": {"web.yaml": "a: 1\n"}},
        {"kind": "Service", "metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}}},
        {"kind": "Service", "metadata": {"name": "other"}, "spec": {"selector": {"app": "other"}}},
        owner,
    ]
    return pod_containers(objects, folder, CLAIMS)


def test_each_replica_is_run_as_the_manifest_says(tmp_path: Path) -> None:
    first, second = containers(tmp_path, deployment())
    assert (first.name, second.name) == ("web-0", "web-1")
    assert first.options == second.options
    assert sorted(first.options) == sorted(
        [
            "--user=5:6",
            "--read-only",
            "--read-only-tmpfs=false",
            "--security-opt=no-new-privileges",
            "--cap-drop=ALL",
            "--env=HOME=/cache",
            f"--volume={tmp_path}/web-1:/etc/web:ro",
            "--volume=/data:/models:ro",
            "--tmpfs=/cache:rw,exec,nosuid,nodev,mode=1777,size=2097152",
            "--stop-timeout=7",
            '--entrypoint=["run"]',
        ]
    )
    assert (first.image, first.command) == ("example.com/web:1", ["-m", "web"])
    assert (first.hosts, first.readiness) == (["web"], (9, "Web"))
    assert (tmp_path / "web-1/web.yaml").read_text() == "a: 1\n"


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ((), "initContainers", []),
        ((), "hostNetwork", True),
        (("containers", 0), "envFrom", []),
        (("containers", 0, "securityContext"), "privileged", True),
        (("securityContext",), "fsGroup", 1),
        (("containers", 0, "volumeMounts", 0), "subPath", "x"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, path: tuple[Any, ...], key: str, value: Any) -> None:
    """A key that a kubelet obeys: run without it, the container would not be what the manifest says."""
    owner = copy.deepcopy(deployment())
    part: Any = owner["spec"]["template"]["spec"]
    for step in path:
        part = part[step]
    part[key] = value
    with pytest.raises(ValueError, match=f"{key} is not known"):
        containers(tmp_path, owner)


def test_volume_of_another_kind_is_refused(tmp_path: Path) -> None:
    owner = deployment()
    owner["spec"]["template"]["spec"]["volumes"][2] = {"name": "cache", "hostPath": {"path": "/"}}
    with pytest.raises(ValueError, match="volume cache"):
        containers(tmp_path, owner)
