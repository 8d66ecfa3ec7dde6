"""What every pod must have, whatever it runs."""

import drafter_service.app
import gateway.app
import verifier_service.app
from tests.deploy.manifests import VERSION, Object, Workload, of_kind, tandem_workloads, workloads

HEALTH_NAMES = {
    "gateway": gateway.app.SERVICES,
    "verifier_service": verifier_service.app.SERVICES,
    "drafter_service": [drafter_service.app.SERVICE],
}
"""What each registers with grpc.health.v1, besides ""."""

CLAIM = "tandem-models"
"""What components/model-pvc makes."""

_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def pods_are_restricted(objects: list[Object]) -> list[str]:
    """Pod Security's `restricted`, a root file system that cannot be written, and no token."""
    problems = []
    for w in workloads(objects):
        pod, container = w.spec.get("securityContext", {}), w.container.get("securityContext", {})
        wrong = {
            "runAsNonRoot": pod.get("runAsNonRoot") is not True,
            "runAsUser": not isinstance(pod.get("runAsUser"), int) or pod["runAsUser"] == 0,
            "seccompProfile": pod.get("seccompProfile") != {"type": "RuntimeDefault"},
            "allowPrivilegeEscalation": container.get("allowPrivilegeEscalation") is not False,
            "readOnlyRootFilesystem": container.get("readOnlyRootFilesystem") is not True,
            "capabilities": container.get("capabilities") != {"drop": ["ALL"]},
            "automountServiceAccountToken": w.spec.get("automountServiceAccountToken") is not False,
            "enableServiceLinks": w.spec.get("enableServiceLinks") is not False,
            "hostNetwork": any(w.spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")),
        }
        problems += [f"{w.name}: {key}" for key, is_wrong in wrong.items() if is_wrong]
        account = w.spec.get("serviceAccountName")
        if account and account not in (o["metadata"]["name"] for o in of_kind(objects, "ServiceAccount")):
            problems.append(f"{w.name}: no ServiceAccount {account}")
    return problems


def images_are_of_one_release(objects: list[Object]) -> list[str]:
    """The project's version on all images; the gateway's has no torch, so only gateways and jobs take it."""
    problems = []
    for w in workloads(objects):
        name, _, tag = w.container["image"].rpartition(":")
        if tag != VERSION:
            problems.append(f"{w.name}: image {w.container['image']} is not of version {VERSION}")
        wanted = "tandem-worker" if w.module in ("verifier_service", "drafter_service") else "tandem-gateway"
        if name.rpartition("/")[2] != wanted:
            problems.append(f"{w.name}: image {name} is not {wanted}")
    return problems


def volumes_are_mounted(objects: list[Object]) -> list[str]:
    """Each mount has its volume and the other way round; claims exist; who only reads cannot write."""
    problems = []
    for w in workloads(objects):
        volumes = {v["name"]: v for v in w.spec.get("volumes", [])}
        mounts = {m["name"]: m for m in w.container.get("volumeMounts", [])}
        problems += [f"{w.name}: {name} is only one of volume and mount" for name in volumes.keys() ^ mounts.keys()]
        for name in volumes.keys() & mounts.keys():
            claim = volumes[name].get("persistentVolumeClaim")
            if claim and claim["claimName"] != CLAIM:
                problems.append(f"{w.name}: no claim {claim['claimName']}, models are in {CLAIM}")
            if claim and w.owner["kind"] != "Pod" and not (claim.get("readOnly") and mounts[name].get("readOnly")):
                problems.append(f"{w.name}: {name} is not read only")
        home = [e["value"] for e in w.container.get("env", []) if e["name"] == "HOME"]
        writable = [m["mountPath"] for m in mounts.values() if "emptyDir" in volumes.get(m["name"], {})]
        problems += [f"{w.name}: HOME {path} cannot be written" for path in home if path not in writable]
    return problems


def memory_holds_shm(objects: list[Object]) -> list[str]:
    """A volume in memory counts as the container's: its limit must leave as much again for the process."""
    problems = []
    for w in workloads(objects):
        empty = [v["emptyDir"] for v in w.spec.get("volumes", []) if "emptyDir" in v]
        shm = sum(_bytes(e["sizeLimit"]) for e in empty if e.get("medium") == "Memory")
        limit = _bytes(w.container["resources"]["limits"]["memory"])
        if limit < 2 * shm:
            problems.append(f"{w.name}: {limit} bytes of memory, of which {shm} may be /dev/shm")
        problems += [f"{w.name}: an emptyDir without sizeLimit" for e in empty if "sizeLimit" not in e]
    return problems


def probes_ask_what_is_served(objects: list[Object]) -> list[str]:
    """Readiness asks a service that the code registers; start and liveness ask "", whatever the state of peers."""
    problems = []
    for w in tandem_workloads(objects):
        probes = {key: w.container.get(key) for key in ("startupProbe", "readinessProbe", "livenessProbe")}
        if not w.serves:
            problems += [f"{w.name}: {key}, but it serves nobody" for key, probe in probes.items() if probe]
            continue
        assert w.module
        for key, probe in probes.items():
            names = HEALTH_NAMES[w.module] if key == "readinessProbe" else [""]
            asked = (probe or {}).get("grpc", {}).get("service", "")
            if probe is None or "grpc" not in probe:
                problems.append(f"{w.name}: no gRPC {key}")
            elif asked not in names:
                problems.append(f"{w.name}: {key} asks {asked!r}, not one of {names}")
    return problems


def rollouts_have_room(objects: list[Object]) -> list[str]:
    """A pod with GPUs leaves before its successor comes; a rollout is not given up while the startup probe waits."""
    problems = []
    for w in tandem_workloads(objects):
        spec = w.owner["spec"]
        if w.gpus and _surge(w) != 0:
            problems.append(f"{w.name}: needs {w.gpus} GPUs more for a rollout")
        startup = w.container.get("startupProbe")
        if w.owner["kind"] == "Deployment" and startup:
            patience = startup["periodSeconds"] * startup["failureThreshold"]
            if spec.get("progressDeadlineSeconds", 600) < patience:
                problems.append(f"{w.name}: progressDeadlineSeconds is less than the {patience} s of startupProbe")
    return problems


def _surge(w: Workload) -> int:
    spec = w.owner["spec"]
    if w.owner["kind"] == "LeaderWorkerSet":
        return spec["rolloutStrategy"]["rollingUpdateConfiguration"]["maxSurge"]
    strategy = spec.get("strategy", {})
    return 0 if strategy.get("type") == "Recreate" else strategy.get("rollingUpdate", {}).get("maxSurge", 1)


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]
