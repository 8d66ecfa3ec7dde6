"""The sockets between rank 0 and the other ranks: steps go out, news of life and death comes back.

A process that dies, however it dies, closes its sockets; a host that is gone is found by TCP's own keepalive. So nobody
sends heartbeats. Rank 0 sends each message as its length in numbers and int32 numbers; length 0 ends the work. A
follower sends READY once it has loaded, and a text before it gives up.
"""

import contextlib
import logging
import os
import select
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

import numpy as np

from tandem.errors import Unavailable
from verifier_service.parallel.step_message import Message

logger = logging.getLogger(__name__)

READY = b"\0"
_LENGTH = struct.Struct("<I")
_REAP_SECONDS = 2.0


class RankLost(Unavailable):
    """A rank is gone, and the target with it."""

    def __init__(self, rank: int, reason: str):
        super().__init__(f"verifier: rank {rank} is gone: {reason}")
        self.rank = rank
        self.reason = reason


class Followers:
    """Rank 0's view of the others."""

    def __init__(self, links: Mapping[int, socket.socket], pids: Mapping[int, int]):
        """links: by rank. pids: of those that are children of this process."""
        self._links = links
        self._pids = pids
        self._open = set(links)
        """Ranks whose end of their link is open: they live."""
        self._ready = threading.Semaphore(0)
        self._lost: RankLost | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[RankLost], None]] = []
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def on_lost(self, callback: Callable[[RankLost], None]) -> None:
        """Called once, by a thread of its own, for the first rank that is lost; at once if one is."""
        with self._lock:
            self._callbacks.append(callback)
            lost = self._lost
        if lost:
            callback(lost)

    def wait_until_ready(self) -> None:
        """Until all have loaded. RankLost if one is gone."""
        for _ in self._links:
            self._ready.acquire()
        if self._lost:
            raise self._lost

    def send(self, message: Message) -> None:
        """To all. RankLost if one is gone."""
        data = _LENGTH.pack(message.size) + message.tobytes()
        for rank, link in self._links.items():
            try:
                link.sendall(data)
            except OSError as error:
                self._watcher.join(_REAP_SECONDS)
                raise self._lost or RankLost(rank, str(error)) from None

    def stop(self, grace_seconds: float) -> None:
        """Tell all to end; children that do not are killed."""
        self._stopping = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.sendall(_LENGTH.pack(0))
        self._watcher.join(grace_seconds)
        for rank in self._open & self._pids.keys():
            logger.log(logging.WARNING if grace_seconds else logging.DEBUG, "rank %d did not end: killed", rank)
            os.kill(self._pids[rank], signal.SIGKILL)

    def _watch(self) -> None:
        """Until all have closed their end, or one is lost."""
        said = dict.fromkeys(self._links, b"")
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while self._open:
                for key, _ in selector.select():
                    rank, link = key.data, self._links[key.data]
                    broken = "its connection closed"
                    try:
                        data = link.recv(65536)
                    except OSError as error:
                        data, broken = b"", str(error)
                    if data.startswith(READY):
                        self._ready.release()
                    said[rank] += data.removeprefix(READY)
                    if not data:
                        selector.unregister(link)
                        self._open.discard(rank)
                        if not self._stopping:
                            told = said[rank].decode(errors="replace")
                            self._lose(RankLost(rank, told or self._end_of(rank) or broken))
                            return

    def _end_of(self, rank: int) -> str | None:
        """How a child ended."""
        status = _exit_status(self._pids[rank], _REAP_SECONDS) if rank in self._pids else None
        if status is None:
            return None
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"

    def _lose(self, lost: RankLost) -> None:
        with self._lock:
            self._lost = lost
            callbacks = list(self._callbacks)
        for _ in self._links:
            self._ready.release()
        for callback in callbacks:
            callback(lost)


class Leader:
    """Another rank's view of rank 0. Ends this process when rank 0 is gone."""

    def __init__(self, link: socket.socket):
        self._link = link
        self._stopped = False
        threading.Thread(target=self._watch, name="rank 0", daemon=True).start()

    def ready(self) -> None:
        """This rank has loaded its part."""
        self._link.sendall(READY)

    def give_up(self, reason: str) -> None:
        """This rank is about to end."""
        with contextlib.suppress(OSError):
            self._link.sendall(reason.encode())

    def receive(self) -> Message | None:
        """The next message; None: the work is over."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size == 0:
            self._stopped = True
            return None
        return np.frombuffer(self._read(4 * size), dtype=np.int32)

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = self._link.recv_into(view)
            if received == 0:
                _exit_alone()
            view = view[received:]
        return data

    def _watch(self) -> None:
        """A rank that waits for others in a collective would not notice."""
        poller = select.poll()
        poller.register(self._link, select.POLLRDHUP)
        poller.poll()
        if not self._stopped:
            _exit_alone()


def _exit_alone() -> NoReturn:
    logger.error("rank 0 is gone")
    os._exit(1)


def _exit_status(pid: int, seconds: float) -> int | None:
    """Of a child that is about to end: its exit code, -N for signal N; None if it does not end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None
