"""The parts of a stack, as a config file describes them: how each is started, where it serves, when it is ready."""

import contextlib
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from tandem.config import GatewayConfig, StackConfig, VerifierConfig
from tandem.errors import StartupError

GENERATION, VERIFIER, SPECULATION, DRAFTER = (
    "tandem.v1.GenerationService",
    "tandem.v1.VerifierService",
    "tandem.v1.SpeculationService",
    "tandem.Drafter",
)
"""Health service names."""


@dataclass(frozen=True)
class Part:
    """One service process."""

    name: str
    command: tuple[str, ...]
    address: str
    """Where it serves, HOST:PORT as a client dials it."""
    health_services: tuple[str, ...]
    """All SERVING: the part is ready."""
    grace_seconds: float
    """From SIGTERM to SIGKILL."""
    essential: bool = True
    """Its end is the end of the stack; otherwise it is started again."""
    plain_health: str | None = None
    """Where its health is served in plain text if not at its address, which then takes TLS only."""

    @property
    def health_address(self) -> str:
        return self.plain_health or self.address


def parts_of(config: StackConfig, path: Path, verifier_options: tuple[str, ...] = ()) -> list[Part]:
    """Verifier, drafter (where there is something to draft with) and gateway, in the order they start."""

    def command(module: str, *options: str) -> tuple[str, ...]:
        return (sys.executable, "-m", module, "--config", str(path), *options)

    speculates = config.speculates
    parts = [
        Part(
            "verifier",
            command("verifier_service", *verifier_options),
            dialable(config.verifier.listen),
            (VERIFIER, SPECULATION) if speculates else (VERIFIER,),
            config.verifier.shutdown_grace_seconds + 5,
            plain_health=_plain_health(config.verifier),
        ),
    ]
    if speculates:
        parts.append(
            Part(
                "drafter",
                command("drafter_service"),
                dialable(config.drafter.listen),
                (DRAFTER,),
                config.drafter.shutdown_grace_seconds + 5,
                essential=False,
            )
        )
    parts.append(
        Part(
            "gateway",
            command("gateway"),
            dialable(config.gateway.listen),
            (GENERATION,),
            config.gateway.shutdown_grace_seconds + 5,
            plain_health=_plain_health(config.gateway),
        )
    )
    return parts


def check_ports_free(config: StackConfig) -> None:
    """StartupError naming the key of every address that is taken, by another process or twice in the config."""
    sections = {"gateway": config.gateway, "verifier": config.verifier}
    if config.speculates:
        sections["drafter"] = config.drafter
    addresses = {
        f"{name}.{key}": address
        for name, section in sections.items()
        for key in ("listen", "metrics_listen", "health_listen")
        if (address := getattr(section, key, None)) is not None
    }
    problems = []
    with contextlib.ExitStack() as held:
        for key, address in addresses.items():
            host, _, port = address.rpartition(":")
            try:
                family, kind, protocol, _, bindable = socket.getaddrinfo(
                    host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )[0]
                probe = held.enter_context(socket.socket(family, kind, protocol))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(bindable)
                probe.listen()
            except OSError as error:
                problems.append(f"{key}: cannot listen on {address}: {error.strerror}")
    if problems:
        raise StartupError("\n".join(problems))


def _plain_health(section: GatewayConfig | VerifierConfig) -> str | None:
    return dialable(section.health_listen) if section.health_listen else None


def dialable(listen: str) -> str:
    """The address under which this machine reaches a server that listens on `listen`."""
    host, _, port = listen.rpartition(":")
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]", "*": "127.0.0.1"}.get(host, host) + f":{port}"
