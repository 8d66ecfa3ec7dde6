"""A certificate authority for tests, by `cryptography`."""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tandem.tls import ClientFiles, ServerFiles


class Authority:
    """Signs certificates: ECDSA P-256, for 127.0.0.1, for servers and clients, as components/mtls has them made."""

    def __init__(self, name: str = "test"):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = (
            self._builder(self._name, self._key).add_extension(basic, True).sign(self._key, hashes.SHA256())
        )

    def issue(self, secret: Path, name: str) -> None:
        """Put tls.crt, tls.key and ca.crt into a folder as a kubelet does: they are links into a folder that a link
        names, and this one link is replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = self._builder(subject, key).add_extension(host, False).sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pem = serialization.Encoding.PEM
        files = {
            "tls.crt": certificate.public_bytes(pem),
            "tls.key": private,
            "ca.crt": self._certificate.public_bytes(pem),
        }
        secret.mkdir(exist_ok=True)
        data = secret / f"..{certificate.serial_number}"
        data.mkdir()
        for file, content in files.items():
            (data / file).write_bytes(content)
            if not (secret / file).is_symlink():
                (secret / file).symlink_to(f"..data/{file}")
        (secret / "..data_tmp").symlink_to(data.name)
        os.replace(secret / "..data_tmp", secret / "..data")

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )


def of_server(secret: Path, mutual: bool = True) -> ServerFiles:
    return ServerFiles(secret / "tls.crt", secret / "tls.key", secret / "ca.crt" if mutual else None)


def of_client(secret: Path, known: bool = True) -> ClientFiles:
    """Without a certificate of its own if it is not `known`."""
    return ClientFiles(secret / "ca.crt", *((secret / "tls.crt", secret / "tls.key") if known else ()))
