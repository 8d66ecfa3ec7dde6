"""How the ranks of a target come to be: forked by rank 0, or started from outside and brought together by the standard
rendezvous variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), as torchrun sets them."""

import logging
import mmap
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.die_with_parent import die_with_parent
from tandem.errors import StartupError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """This process among the ranks of one target."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among those of this host: which GPU it takes."""
    local_size: int = 1
    links: Mapping[int, socket.socket] = field(default_factory=dict)
    """By rank: of rank 0 to all others, of those to rank 0."""
    pids: Mapping[int, int] = field(default_factory=dict)
    """By rank: children of this process."""
    memory: mmap.mmap | None = None
    """Shared by all ranks, if they are on one host."""
    store: "Store | None" = None
    """Where ranks that were started from outside meet."""


ONLY = Member()
"""The target has one rank."""


def launch(ep: int) -> Member:
    """Become one of `ep` ranks. Call it before the process has threads of its own.

    StartupError if WORLD_SIZE says otherwise or the others do not come.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and world != ep:
        raise StartupError(f"verifier.parallel.ep: is {ep}, but WORLD_SIZE {world} ranks were started")
    if ep == 1:
        return ONLY
    if world == ep:
        from verifier_service.parallel.rendezvous import meet

        return meet(int(os.environ["RANK"]), ep)
    return fork_ranks(ep)


def fork_ranks(size: int) -> Member:
    """Rank 0 returns from here, and so do its children, each as another rank.

    They are forked with torch loaded: that starts 8 ranks on 2 cores 6 s sooner than 8 interpreters would. None has run
    anything in parallel yet, so OpenMP starts fresh in each.
    """
    from verifier_service.parallel.shared_memory import allocate

    memory = allocate(size)
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(size)}
    os.environ["RANK"] = "0"
    parent = os.getpid()
    links: dict[int, socket.socket] = {}
    pids: dict[int, int] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(1, size):
        here, there = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            # Only the two ends of a link may hold it open, or neither would notice that the other is gone.
            for link in (here, *links.values()):
                link.close()
            os.environ["RANK"] = str(rank)
            return Member(rank, size, rank, size, {0: there}, memory=memory)
        there.close()
        links[rank], pids[rank] = here, pid
    logger.info("the other ranks' processes: %s", ", ".join(f"{rank}: {pid}" for rank, pid in pids.items()))
    return Member(0, size, 0, size, links, pids, memory)
