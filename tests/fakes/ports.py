"""Ports for processes that tests start."""

import socket


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]
