"""TLS between client, gateway, verifier and drafter: credentials from PEM files that may be replaced while in use."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from tandem.errors import StartupError

if TYPE_CHECKING:
    from tandem.config import ClientTlsConfig, ServerTlsConfig

logger = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int] | None, ...]
"""What tells a file from the one that was there before: changed time, inode, size; None where there is none."""


@dataclass(frozen=True)
class ClientFiles:
    """What a client has: whom it trusts, and who it is."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None
    where: str = "tls"
    """The config's section, for errors."""

    @property
    def stamp(self) -> Stamp:
        """Differs once a file has been replaced."""
        return _stamp(self.ca, self.certificate, self.key)

    def credentials(self) -> grpc.ChannelCredentials:
        """Of the files as they are now. StartupError naming the one that cannot be used."""
        authorities = _authorities(self.ca, f"{self.where}.ca")
        if self.certificate is None and self.key is None:
            return grpc.ssl_channel_credentials(authorities)
        if self.certificate is None or self.key is None:
            raise StartupError(f"{self.where}: certificate and key must both be set, or neither")
        return grpc.ssl_channel_credentials(authorities, *_identity(self.certificate, self.key, self.where))


@dataclass(frozen=True)
class ServerFiles:
    """What a server has: who it is, and whose certificates its clients must have; None asks them for none."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    where: str = "tls"

    def credentials(self) -> grpc.ServerCredentials:
        """Looked at anew for each connection: files that were replaced count from the next one on; while they cannot be
        used, the last ones do. StartupError naming the file that cannot be used."""
        seen = self._stamp

        def replaced() -> Any:
            nonlocal seen
            if (stamp := self._stamp) == seen:
                return None
            seen = stamp
            try:
                configuration = self._configuration()
            except StartupError as error:
                logger.warning("%s; going on with the certificate from before", error)
                return None
            logger.info("%s: certificate replaced", self.where)
            return configuration

        return grpc.dynamic_ssl_server_credentials(self._configuration(), replaced, self.client_ca is not None)

    @property
    def _stamp(self) -> Stamp:
        return _stamp(self.certificate, self.key, self.client_ca)

    def _configuration(self) -> Any:
        authorities = _authorities(self.client_ca, f"{self.where}.client_ca") if self.client_ca else None
        identity = _identity(self.certificate, self.key, self.where)
        return grpc.ssl_server_certificate_configuration([identity], authorities)


def client_files(section: "ClientTlsConfig | None", where: str) -> ClientFiles | None:
    """Of a section of the config; `where` is its key."""
    return ClientFiles(section.ca, section.certificate, section.key, where) if section else None


def server_files(section: "ServerTlsConfig | None", where: str) -> ServerFiles | None:
    """Of a section of the config; `where` is its key."""
    return ServerFiles(section.certificate, section.key, section.client_ca, where) if section else None


def open_channel(address: str, tls: ClientFiles | None, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
    """A channel in plain text, or by TLS with the files as they are now: StartupError if they cannot be used."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def _stamp(*files: Path | None) -> Stamp:
    found: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            status = file.stat() if file else None
        except OSError:
            status = None
        found.append((status.st_mtime_ns, status.st_ino, status.st_size) if status else None)
    return tuple(found)


def _authorities(file: Path, key: str) -> bytes:
    data = _read(file, key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode())
    except (ssl.SSLError, ValueError):
        raise StartupError(f"{key}: {file} holds no certificate in PEM") from None
    return data


def _identity(certificate: Path, key: Path, where: str) -> tuple[bytes, bytes]:
    """(private key, certificate chain), which is the order that gRPC takes them in."""
    pair = _read(key, f"{where}.key"), _read(certificate, f"{where}.certificate")
    try:
        # gRPC itself says nothing of a pair that it cannot use: connections just fail.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "not PEM, or encrypted"
        raise StartupError(f"{where}.certificate: {certificate} and {key} are no usable pair: {reason}") from None
    return pair


def _read(file: Path, key: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise StartupError(f"{key}: {file}: {error.strerror}") from None
