"""Bringing together ranks that were started from outside, by torchrun or by hand, on one host or on several."""

import contextlib
import hmac
import mmap
import os
import secrets
import socket
import struct
import tempfile
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from tandem.errors import StartupError
from verifier_service.parallel.launch import Member
from verifier_service.parallel.shared_memory import allocate, attach

_PATIENCE = timedelta(minutes=5)
_HELLO = struct.Struct("<32sI")
"""The secret that rank 0 put into the store, and who calls."""


def environment_store() -> Store:
    """The store at MASTER_ADDR:MASTER_PORT. StartupError if it cannot be reached."""
    try:
        store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    except (RuntimeError, ValueError) as error:
        raise StartupError(f"the ranks' rendezvous: {' '.join(str(error).split())}") from None
    return PrefixStore("tandem", store)


def meet(rank: int, size: int) -> Member:
    """Link up with the other ranks. StartupError if they do not come within five minutes."""
    store = environment_store()
    try:
        links = _listen(store, size) if rank == 0 else {0: _call(store, rank)}
        memory = _shared_memory(store, rank, size)
    except (OSError, RuntimeError) as error:
        raise StartupError(f"rank {rank} of {size} does not reach the others: {error}") from None
    for link in links.values():
        _keep_alive(link)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size if memory else 1))
    return Member(rank, size, int(os.environ.get("LOCAL_RANK", rank)), local_size, links, memory=memory, store=store)


def _listen(store: Store, size: int) -> dict[int, socket.socket]:
    """Rank 0: a link to each other rank."""
    secret = secrets.token_bytes(32)
    links: dict[int, socket.socket] = {}
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        server.settimeout(_PATIENCE.total_seconds())
        store.set("link", f"{server.getsockname()[1]} {secret.hex()}")
        while len(links) < size - 1:
            link, _ = server.accept()
            link.settimeout(5.0)
            with contextlib.suppress(OSError, struct.error):
                given, rank = _HELLO.unpack(link.recv(_HELLO.size, socket.MSG_WAITALL))
                if hmac.compare_digest(given, secret) and 0 < rank < size:
                    link.settimeout(None)
                    links[rank] = link
                    continue
            link.close()
    return links


def _call(store: Store, rank: int) -> socket.socket:
    """Another rank: its link to rank 0."""
    port, secret = store.get("link").decode().split()
    link = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), _PATIENCE.total_seconds())
    link.settimeout(None)
    link.sendall(_HELLO.pack(bytes.fromhex(secret), rank))
    return link


def _shared_memory(store: Store, rank: int, size: int) -> mmap.mmap | None:
    """Memory of all ranks, if all can open rank 0's file: then they are on one host."""
    if rank == 0:
        folder = Path("/dev/shm")
        file = (folder if folder.is_dir() else Path(tempfile.gettempdir())) / f"tandem-{secrets.token_hex(16)}"
        memory: mmap.mmap | None = allocate(size, file)
        store.set("memory", str(file))
    else:
        file = Path(store.get("memory").decode())
        try:
            memory = attach(file)
        except OSError:
            memory = None
    store.set(f"memory/{rank}", "yes" if memory else "no")
    try:
        shared = all(store.get(f"memory/{other}") == b"yes" for other in range(size))
    finally:
        if rank == 0:
            file.unlink()
    return memory if shared else None


def _keep_alive(link: socket.socket) -> None:
    """A host that is gone is noticed after 6 s."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 6000)
