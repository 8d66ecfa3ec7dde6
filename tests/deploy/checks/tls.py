"""Certificates: who has which, who is trusted, and that what is replaced is read."""

from pathlib import Path

from tandem.config import ClientTlsConfig, ServerTlsConfig
from tests.deploy.manifests import MODULES, Object, Workload, config_of, mount_of, of_kind, tandem_workloads

_FILES = {"certificate": "tls.crt", "key": "tls.key", "ca": "ca.crt", "client_ca": "ca.crt"}
"""What cert-manager calls them in its Secrets."""


def tls_is_of_both_ends(objects: list[Object]) -> list[str]:
    """Who calls the verifier speaks TLS if it does, and has a certificate if it asks for one."""
    problems = []
    tls = [config_of(objects, w).verifier.tls for w in tandem_workloads(objects) if w.module == "verifier_service"]
    for w in tandem_workloads(objects):
        if w.module == "verifier_service" or not tls:
            continue
        client = getattr(config_of(objects, w), MODULES[w.module or ""]).verifier_tls
        if (client is None) != (tls[0] is None):
            problems.append(f"{w.name}: only one of it and the verifier speaks TLS")
        elif client and tls[0].client_ca and not client.certificate:
            problems.append(f"{w.name}: has no certificate, the verifier asks for one")
    return problems


def certificates_are_mounted(objects: list[Object]) -> list[str]:
    """Files of the config are those of a Secret that a Certificate of this tree fills, mounted so that it is updated.
    The certificate is of the kind and for the names that its use needs."""
    problems = []
    for w in tandem_workloads(objects):
        for section, usage in _tls_sections(objects, w) if w.serves else []:
            for key in _FILES.keys() & type(section).model_fields.keys():
                if path := getattr(section, key):
                    problems += [f"{w.name}: {problem}" for problem in _problems_of(objects, w, path, key, usage)]
    return problems


def _problems_of(objects: list[Object], w: Workload, path: Path, key: str, usage: str) -> list[str]:
    mount, volume = mount_of(w, str(path)) or ({}, {})
    secret = volume.get("secret", {}).get("secretName")
    found = [o["spec"] for o in of_kind(objects, "Certificate") if o["spec"]["secretName"] == secret]
    if path.name != _FILES[key] or path.parent != Path(mount.get("mountPath", "/")) or not found:
        return [f"{path} is in no Secret of a Certificate"]
    problems = []
    if "subPath" in mount or not mount.get("readOnly"):
        problems.append(f"{path} is mounted by subPath, and so never updated, or can be written")
    if usage not in found[0]["usages"]:
        problems.append(f"the certificate in {secret} is not for {usage}")
    if usage == "server auth":
        missing = _services(objects, w) - set(found[0]["dnsNames"])
        problems += [f"its certificate is not for {name}" for name in sorted(missing)]
    return problems


def certificates_are_signed(objects: list[Object]) -> list[str]:
    """By one authority of this tree. All are ECDSA P-256; leaves get a new key each time, the authority does not."""
    problems = []
    certificates, issuers = of_kind(objects, "Certificate"), of_kind(objects, "Issuer")
    authorities = set()
    for o in certificates:
        name, spec = f"Certificate {o['metadata']['name']}", o["spec"]
        key, is_authority = spec["privateKey"], spec.get("isCA", False)
        if (key["algorithm"], key["size"]) != ("ECDSA", 256):
            problems.append(f"{name}: is not ECDSA P-256")
        if key.get("rotationPolicy") != ("Never" if is_authority else "Always"):
            problems.append(f"{name}: rotationPolicy {key.get('rotationPolicy')}")
        if is_authority:
            continue
        signing = [i["spec"] for i in issuers if i["metadata"]["name"] == spec["issuerRef"]["name"]]
        secret = signing[0].get("ca", {}).get("secretName") if signing else None
        authorities.add(secret)
        if not any(c["spec"]["secretName"] == secret and c["spec"].get("isCA") for c in certificates):
            problems.append(f"{name}: no authority signs it")
    return problems + (["certificates are of several authorities"] if len(authorities) > 1 else [])


def proxies_know_of_tls(objects: list[Object]) -> list[str]:
    """A Service before a server that speaks TLS does not call it plain HTTP/2, and routes to it say how to trust it."""
    problems = []
    for w in tandem_workloads(objects):
        section = getattr(config_of(objects, w), MODULES[w.module or ""])
        if not w.serves or w.module == "drafter_service":
            continue
        for service in of_kind(objects, "Service"):
            name = service["metadata"]["name"]
            if not service["spec"]["selector"].items() <= w.labels.items():
                continue
            (grpc,) = (p for p in service["spec"]["ports"] if p["name"] == "grpc")
            if (grpc.get("appProtocol") == "kubernetes.io/h2c") == bool(section.tls):
                problems.append(f"Service {name}: appProtocol {grpc.get('appProtocol')}")
            routes = [
                b for r in of_kind(objects, "GRPCRoute") for rule in r["spec"]["rules"] for b in rule["backendRefs"]
            ]
            policies = [
                p["spec"]["validation"]["hostname"]
                for p in of_kind(objects, "BackendTLSPolicy")
                if (name, "grpc") in [(t["name"], t.get("sectionName")) for t in p["spec"]["targetRefs"]]
            ]
            wanted = [name] if section.tls and name in [b["name"] for b in routes] else []
            if policies != wanted:
                problems.append(f"Service {name}: the proxy expects TLS for {policies}, it should for {wanted}")
    return problems


def _tls_sections(objects: list[Object], w: Workload) -> list[tuple[ServerTlsConfig | ClientTlsConfig, str]]:
    section = getattr(config_of(objects, w), MODULES[w.module or ""])
    sections = [(getattr(section, "tls", None), "server auth"), (getattr(section, "verifier_tls", None), "client auth")]
    return [(tls, usage) for tls, usage in sections if tls]


def _services(objects: list[Object], w: Workload) -> set[str]:
    """Names by which clients dial it."""
    services = [o for o in of_kind(objects, "Service") if o["spec"]["selector"].items() <= w.labels.items()]
    return {o["metadata"]["name"] for o in services}
