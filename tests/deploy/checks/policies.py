"""NetworkPolicies against the calls that the services make."""

from dataclasses import dataclass

from tests.deploy.checks.network import ports_of
from tests.deploy.manifests import Object, Workload, of_kind, selects, tandem_workloads

_NAMESPACE = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class _Peer:
    """One end of a connection."""

    name: str
    labels: tuple[tuple[str, str], ...]
    namespace: str = "tandem"


_CLIENT = _Peer("client", (), "elsewhere")
_PROMETHEUS = _Peer("prometheus", (("app.kubernetes.io/name", "prometheus"),), "monitoring")
_DNS = _Peer("dns", (("k8s-app", "kube-dns"),), "kube-system")
_RENDEZVOUS, _EPHEMERAL = 29500, 43210
"""Ports of ranks: torchrun's, and any that the system gives them."""


def policies_are_the_call_graph(objects: list[Object]) -> list[str]:
    """Where there are policies, they let pass each call that the services make, and no other between these peers."""
    policies = of_kind(objects, "NetworkPolicy")
    if not policies:
        return []
    ours = [(w, _Peer(w.name, tuple(w.labels.items()))) for w in tandem_workloads(objects)]
    wanted = {(peer, _DNS, 53, protocol) for _, peer in ours for protocol in ("UDP", "TCP")}
    targets = [(_DNS, 53, "UDP"), (_DNS, 53, "TCP")]
    for w, peer in ours:
        ports = ports_of(w)
        targets += [(peer, port, "TCP") for port in [*ports.values(), _RENDEZVOUS, _EPHEMERAL]]
        if w.serves:
            wanted.add((_PROMETHEUS, peer, ports["metrics"], "TCP"))
        if w.module == "gateway":
            wanted.add((_CLIENT, peer, ports["grpc"], "TCP"))
            wanted.add((_PROMETHEUS, peer, ports["grpc"], "TCP"))  # Clients come from anywhere.
        if w.module == "verifier_service":
            among_ranks = [*ports.values(), _RENDEZVOUS, _EPHEMERAL]
            wanted |= {(other, peer, p, "TCP") for o, other in ours for p in among_ranks if _are_ranks(o, w)}
            if w.serves:
                wanted |= {(other, peer, ports["grpc"], "TCP") for o, other in ours if o.module != w.module}
    sources = [_CLIENT, _PROMETHEUS, *(peer for _, peer in ours)]
    problems = []
    for source in sources:
        for target, port, protocol in targets:
            if source == target or (target == _DNS and source in (_CLIENT, _PROMETHEUS)):
                continue
            passes = _passes(policies, source, target, port, protocol)
            if passes != ((source, target, port, protocol) in wanted):
                verb = "reaches" if passes else "does not reach"
                problems.append(f"{source.name} {verb} {target.name} at {protocol} {port}")
    return problems


def _are_ranks(a: Workload, b: Workload) -> bool:
    """Both are pods of one target over several."""
    return a.owner is b.owner and a.owner["kind"] == "LeaderWorkerSet"


def _passes(policies: list[Object], source: _Peer, target: _Peer, port: int, protocol: str) -> bool:
    """As Kubernetes defines it: where policies select an end, one of their rules must allow the other end and port."""

    def allows(end: _Peer, other: _Peer, direction: str, key: str) -> bool:
        if end.namespace != "tandem":
            return True
        selecting = [
            p["spec"]
            for p in policies
            if direction in p["spec"]["policyTypes"] and selects(p["spec"]["podSelector"], dict(end.labels))
        ]
        rules = [rule for spec in selecting for rule in spec.get(direction.lower(), [])]
        return not selecting or any(
            _matches_port(rule.get("ports"), port, protocol) and _matches_peer(rule.get(key), other) for rule in rules
        )

    return allows(source, target, "Egress", "to") and allows(target, source, "Ingress", "from")


def _matches_port(ports: list[Object] | None, port: int, protocol: str) -> bool:
    return ports is None or any(p["port"] == port and p.get("protocol", "TCP") == protocol for p in ports)


def _matches_peer(peers: list[Object] | None, other: _Peer) -> bool:
    if peers is None:
        return True
    for peer in peers:
        namespace = peer.get("namespaceSelector")
        here = selects(namespace, {_NAMESPACE: other.namespace}) if namespace else other.namespace == "tandem"
        if here and selects(peer.get("podSelector", {}), dict(other.labels)):
            return True
    return False
