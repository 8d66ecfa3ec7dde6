"""Collectives of ranks on one host, on the CPU, through memory they share.

Each rank has a slot. For a sum every rank but 0 puts its part into its slot and says so; rank 0 adds the parts up in
rank order, as they come, and says when the result is there for all to copy. So there is one wait per rank and
collective, and all get the same bits. Nobody writes to a slot before its reader is done: a rank writes when it has the
last result, rank 0 writes when all have arrived again.

Measured, 8 ranks on 2 cores, [8, 576] fp32: 0.15 ms, and 0.02 ms for 2 ranks (process barriers: 0.5 and 0.3). Waits
sleep in semaphores: ranks that poll and yield take as long and eat the time of others; those that each add up a part
(two waits) take three times as long at 8 rows and no less at 256.
"""

import ctypes
import mmap
import os
from pathlib import Path

import torch

_SLOT_BYTES = 4 << 20
"""Larger tensors go in pieces. Memory that is never touched costs nothing."""
_SEMAPHORE_BYTES = 64
"""sem_t has 32 bytes on Linux; a cache line each."""

_libc = ctypes.CDLL(None, use_errno=True)


def allocate(size: int, file: Path | None = None) -> mmap.mmap:
    """Zeroed memory for the collectives of `size` ranks, shared with children that this process forks, or, with a new
    file, with those who attach to that."""
    total = _header_bytes(size) + size * _SLOT_BYTES
    if file is None:
        memory = mmap.mmap(-1, total)
    else:
        with file.open("x+b") as new:
            new.truncate(total)
            memory = mmap.mmap(new.fileno(), total)
    for i in range(2 * size):
        if _libc.sem_init(_semaphore(memory, i), 1, 0) != 0:
            raise OSError(ctypes.get_errno(), f"sem_init: {os.strerror(ctypes.get_errno())}")
    return memory


def attach(file: Path) -> mmap.mmap:
    """What another process allocated."""
    with file.open("r+b") as existing:
        return mmap.mmap(existing.fileno(), 0)


class SharedMemoryRanks:
    """Ranks that share `memory`, which `allocate` made for this size."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int):
        self.rank = rank
        self.size = size
        self._arrived = [_semaphore(memory, i) for i in range(size)]
        """By rank: its slot is filled."""
        self._done = [_semaphore(memory, size + i) for i in range(size)]
        """By rank: it may copy the result, and fill its slot again."""
        whole = torch.frombuffer(memory, dtype=torch.uint8, offset=_header_bytes(size))
        self._slots = list(whole.view(size, _SLOT_BYTES))
        """By rank; rank 0's is the result's."""
        self._shaped: tuple[tuple[torch.Size, torch.dtype] | None, list[torch.Tensor]] = (None, [])
        """The slots as a tensor of the last shape: most are like the one before."""
        self._abortion: Exception | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See Ranks. Adds up in fp32, and rounds once."""
        x = x.contiguous()
        if x.numel() * x.element_size() <= _SLOT_BYTES:
            self._reduce(x)
        else:
            for piece in x.view(-1).split(_SLOT_BYTES // x.element_size()):
                self._reduce(piece)
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        rows_each = _SLOT_BYTES // (x.shape[1] * x.element_size())
        pieces = [self._gather(piece) for piece in x.split(rows_each)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def abort(self, error: Exception) -> None:
        """Called by another thread of rank 0: whatever waits, or will, raises this."""
        self._abortion = error
        for semaphore in self._arrived:
            _libc.sem_post(semaphore)

    def _reduce(self, x: torch.Tensor) -> None:
        result, *parts = self._slots_like(x)
        if self.rank:
            parts[self.rank - 1].copy_(x)
            self._arrive()
            x.copy_(result)
            return
        total = x if x.dtype == torch.float32 else x.float()
        for arrived, part in zip(self._arrived[1:], parts, strict=True):
            self._wait(arrived)
            total += part
        result.copy_(total)
        self._release()
        if total is not x:
            x.copy_(result)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        _, *parts = self._slots_like(x)
        if self.rank:
            parts[self.rank - 1].copy_(x)
            self._arrive()
            return x
        for arrived in self._arrived[1:]:
            self._wait(arrived)
        whole = torch.cat([x, *parts], dim=-1)
        self._release()
        return whole

    def _slots_like(self, x: torch.Tensor) -> list[torch.Tensor]:
        wanted = x.shape, x.dtype
        if self._shaped[0] != wanted:
            size = x.numel() * x.element_size()
            self._shaped = wanted, [slot[:size].view(x.dtype).view(x.shape) for slot in self._slots]
        return self._shaped[1]

    def _arrive(self) -> None:
        _libc.sem_post(self._arrived[self.rank])
        self._wait(self._done[self.rank])

    def _release(self) -> None:
        for semaphore in self._done[1:]:
            _libc.sem_post(semaphore)

    def _wait(self, semaphore: ctypes.c_void_p) -> None:
        while _libc.sem_wait(semaphore) != 0:
            pass  # a signal came
        if self._abortion:
            raise self._abortion


def _header_bytes(size: int) -> int:
    return -(-2 * size * _SEMAPHORE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def _semaphore(memory: mmap.mmap, index: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + index * _SEMAPHORE_BYTES)
