"""In certificates, and in who has them."""

from tests.deploy.checks import network, tls
from tests.deploy.manifests import named
from tests.deploy.mistakes.planting import Mistake, config_file, container, pod

TREE = "base+mtls"

MISTAKES: dict[str, Mistake] = {
    "a drafter that speaks no TLS": (
        TREE,
        lambda o: config_file(o, "mtls.yaml", "verifier_tls: *client", "log_level: info"),
        tls.tls_is_of_both_ends,
        "Deployment drafter: only one of it and the verifier speaks TLS",
    ),
    "a client without the certificate that is asked for": (
        TREE,
        lambda o: config_file(
            o,
            "mtls.yaml",
            "/ca.crt\n    certificate: /etc/tandem-tls/tls.crt\n    key: /etc/tandem-tls/tls.key",
            "/ca.crt",
        ),
        tls.tls_is_of_both_ends,
        "has no certificate",
    ),
    "a Secret that nobody fills": (
        TREE,
        lambda o: pod(o, "gateway")["volumes"][-1]["secret"].update(secretName="gateway-tls"),
        tls.certificates_are_mounted,
        "in no Secret of a Certificate",
    ),
    "a certificate that is never updated": (
        TREE,
        lambda o: container(o, "verifier")["volumeMounts"][-1].update(subPath="tls.crt"),
        tls.certificates_are_mounted,
        "mounted by subPath",
    ),
    "a certificate for another name than is dialled": (
        TREE,
        lambda o: named(o, "Certificate", "verifier")["spec"].update(dnsNames=["verifier.tandem.svc"]),
        tls.certificates_are_mounted,
        "not for verifier",
    ),
    "a client's certificate for servers only": (
        TREE,
        lambda o: named(o, "Certificate", "gateway")["spec"].update(usages=["server auth"]),
        tls.certificates_are_mounted,
        "is not for client auth",
    ),
    "a key that stays for ever": (
        TREE,
        lambda o: named(o, "Certificate", "drafter")["spec"]["privateKey"].update(rotationPolicy="Never"),
        tls.certificates_are_signed,
        "Certificate drafter: rotationPolicy Never",
    ),
    "a certificate that signs itself": (
        TREE,
        lambda o: named(o, "Certificate", "gateway")["spec"]["issuerRef"].update(name="tandem-self-signed"),
        tls.certificates_are_signed,
        "no authority signs it",
    ),
    "a probe of the port that speaks TLS": (
        TREE,
        lambda o: container(o, "gateway")["readinessProbe"]["grpc"].update(port=7600),
        network.ports_are_listened_on,
        "readinessProbe asks port 7600",
    ),
    "a proxy that calls a TLS server in plain text": (
        "multi-node",
        lambda o: o.remove(named(o, "BackendTLSPolicy", "gateway")),
        tls.proxies_know_of_tls,
        "the proxy expects TLS for []",
    ),
    "plain HTTP/2 announced where TLS is spoken": (
        TREE,
        lambda o: named(o, "Service", "gateway")["spec"]["ports"][0].update(appProtocol="kubernetes.io/h2c"),
        tls.proxies_know_of_tls,
        "appProtocol kubernetes.io/h2c",
    ),
}
