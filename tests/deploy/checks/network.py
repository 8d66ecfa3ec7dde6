"""Who reaches whom: ports, selectors, addresses, routes."""

from tests.deploy.checks.pods import HEALTH_NAMES
from tests.deploy.manifests import (
    MODULES,
    Object,
    Workload,
    config_of,
    named,
    of_kind,
    selects,
    tandem_workloads,
    workloads,
)


def ports_are_listened_on(objects: list[Object]) -> list[str]:
    """Container ports are the config's, probes and Services use them."""
    problems = []
    for w in tandem_workloads(objects):
        ports = ports_of(w)
        if w.serves:
            section = getattr(config_of(objects, w), MODULES[w.module or ""])
            addresses = {"grpc": section.listen, "metrics": section.metrics_listen or ":0"}
            if health := getattr(section, "health_listen", None):
                addresses["health"] = health
            listens = {name: _port(address) for name, address in addresses.items()}
            if ports != listens:
                problems.append(f"{w.name}: ports {ports}, the config listens on {listens}")
            if not all(address.startswith("0.0.0.0:") for address in addresses.values()):
                problems.append(f"{w.name}: does not listen on all addresses")
        for key in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = w.container.get(key, {}).get("grpc", {}).get("port")
            # Probes speak no TLS: where it is on, health has a port of its own.
            if asked is not None and asked != ports.get("health", ports.get("grpc")):
                problems.append(f"{w.name}: {key} asks port {asked}")
    for service in of_kind(objects, "Service"):
        for w in _behind(objects, service):
            for port in service["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                number = ports_of(w).get(target, target if target in ports_of(w).values() else None)
                if number is None:
                    problems.append(f"Service {service['metadata']['name']}: {w.name} has no port {target}")
                elif service["spec"].get("clusterIP") == "None" and number != port["port"]:
                    problems.append(f"Service {service['metadata']['name']}: headless, so port must be {number}")
    return problems


def selectors_select(objects: list[Object]) -> list[str]:
    """Every selector of pods selects pods of this tree; a workload's own template matches its selector."""
    problems = []
    pods = [w.labels for w in workloads(objects)]
    for o in of_kind(objects, "Deployment"):
        if not selects(o["spec"]["selector"], o["spec"]["template"]["metadata"]["labels"]):
            problems.append(f"Deployment {o['metadata']['name']}: does not select its own pods")
    found = []
    for o in of_kind(objects, "Service", "PodDisruptionBudget", "PodMonitor"):
        selector = o["spec"]["selector"]
        name = f"{o['kind']} {o['metadata']['name']}"
        found.append((name, {"matchLabels": selector} if o["kind"] == "Service" else selector))
    for o in of_kind(objects, "NetworkPolicy"):
        name = f"NetworkPolicy {o['metadata']['name']}"
        found.append((name, o["spec"]["podSelector"]))
        rules = [*o["spec"].get("ingress", []), *o["spec"].get("egress", [])]
        peers = [peer for rule in rules for peer in [*rule.get("from", []), *rule.get("to", [])]]
        found += [(name, peer["podSelector"]) for peer in peers if "namespaceSelector" not in peer]
    for w in workloads(objects):
        found += [(w.name, c["labelSelector"]) for c in w.spec.get("topologySpreadConstraints", [])]
        affinity = w.spec.get("affinity", {}).get("podAffinity", {})
        terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
        found += [(w.name, term["podAffinityTerm"]["labelSelector"]) for term in terms]
    for name, selector in found:
        if not any(selects(selector, labels) for labels in pods):
            problems.append(f"{name}: {selector} selects no pods")
    for o in of_kind(objects, "ServiceMonitor"):
        services = [s for s in of_kind(objects, "Service") if selects(o["spec"]["selector"], s["metadata"]["labels"])]
        if not services:
            problems.append(f"ServiceMonitor {o['metadata']['name']}: selects no Service")
    return problems


def addresses_are_services(objects: list[Object]) -> list[str]:
    """Who dials the verifier dials a Service of this tree, at its port, and rank 0 is behind it, alone."""
    problems = []
    for w in tandem_workloads(objects):
        if w.module == "verifier_service":
            continue
        section = getattr(config_of(objects, w), MODULES[w.module or ""])
        host, _, port = section.verifier.rpartition(":")
        services = [s for s in of_kind(objects, "Service") if s["metadata"]["name"] == host]
        if not services or int(port) not in (p["port"] for p in services[0]["spec"]["ports"]):
            problems.append(f"{w.name}: dials {section.verifier}, which is no Service")
        elif any(not b.serves or b.module != "verifier_service" for b in _behind(objects, services[0])):
            problems.append(f"{w.name}: dials {section.verifier}, which is not rank 0 alone")
    return problems


def sessions_stick(objects: list[Object]) -> list[str]:
    """A client comes back to the gateway that knows its session, as long as a session lasts."""
    problems = []
    for w in tandem_workloads(objects):
        if w.module != "gateway":
            continue
        ttl = config_of(objects, w).gateway.session_ttl_seconds
        spec = named(objects, "Service", "gateway")["spec"]
        seconds = spec.get("sessionAffinityConfig", {}).get("clientIP", {}).get("timeoutSeconds", 0)
        if spec.get("sessionAffinity") != "ClientIP" or seconds < ttl:
            problems.append(f"Service gateway: clients stick for {seconds} s, sessions live {ttl}")
    return problems


def routes_stream(objects: list[Object]) -> list[str]:
    """Routes lead to what a gateway serves, by a port that is there, and no proxy cuts a stream."""
    problems = []
    for route in of_kind(objects, "GRPCRoute"):
        name = route["metadata"]["name"]
        parents = {parent["name"] for parent in route["spec"]["parentRefs"]}
        missing = parents - {g["metadata"]["name"] for g in of_kind(objects, "Gateway")}
        problems += [f"GRPCRoute {name}: no Gateway {parent}" for parent in missing]
        for rule in route["spec"]["rules"]:
            services = [match["method"]["service"] for match in rule["matches"]]
            problems += [f"GRPCRoute {name}: no service {s}" for s in services if s not in HEALTH_NAMES["gateway"]]
            for backend in rule["backendRefs"]:
                ports = [p["port"] for p in named(objects, "Service", backend["name"])["spec"]["ports"]]
                if backend["port"] not in ports:
                    problems.append(f"GRPCRoute {name}: {backend['name']} has no port {backend['port']}")
        policies = [
            p["spec"]
            for p in of_kind(objects, "BackendTrafficPolicy")
            if ("GRPCRoute", name) in [(r["kind"], r["name"]) for r in p["spec"]["targetRefs"]]
        ]
        timeouts = [p["timeout"]["http"] for p in policies if "timeout" in p]
        if [(t["requestTimeout"], t["maxStreamDuration"]) for t in timeouts] != [("0s", "0s")]:
            problems.append(f"GRPCRoute {name}: Envoy cuts its streams")
        if [p.get("loadBalancer", {}).get("type") for p in policies] != ["ConsistentHash"]:
            problems.append(f"GRPCRoute {name}: calls of a client do not go where its sessions are")
    return problems


def _behind(objects: list[Object], service: Object) -> list[Workload]:
    return [w for w in workloads(objects) if selects({"matchLabels": service["spec"]["selector"]}, w.labels)]


def ports_of(w: Workload) -> dict[str, int]:
    """Container ports by name."""
    return {port["name"]: port["containerPort"] for port in w.container.get("ports", [])}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
