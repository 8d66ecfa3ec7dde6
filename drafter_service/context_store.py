"""Which positions of which sequences one verifier's drafter holds. Pure bookkeeping: knows no tensors and no RPC."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from drafter_service.messages import Gap

Storage = TypeVar("Storage")


@dataclass
class _Held(Generic[Storage]):
    epoch: int
    storage: Storage
    positions: int = 0
    """Positions [0, positions) are written; what lies behind is never read."""


class ContextStore(Generic[Storage]):
    """The sequences of one stream. It ends with the stream: another stream may use the same ids for others."""

    def __init__(self, new_storage: Callable[[], Storage]):
        """new_storage makes room for one sequence."""
        self._new_storage = new_storage
        self._sequences: dict[int, _Held[Storage]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def extend(self, sequence_id: int, epoch: int, start: int, count: int) -> Storage | Gap | None:
        """Where to write positions [start, start + count), which then count as held.

        A later epoch starts the sequence anew, with new storage; of an earlier one nothing is wanted: None. Positions
        already held may come again; a start beyond what is held is a Gap and changes nothing else.
        """
        held = self._at_epoch(sequence_id, epoch)
        if held is None:
            return None
        if start > held.positions:
            return Gap(sequence_id, epoch, held.positions)
        held.positions = max(held.positions, start + count)
        return held.storage

    def behind(self, sequence_id: int, epoch: int, base: int) -> Storage | Gap | None:
        """The storage of a sequence of which exactly [0, base) is held, to draft behind it.

        A Gap if less is held. None if the verifier has moved on since: a later epoch or more positions are held.
        """
        held = self._at_epoch(sequence_id, epoch)
        if held is None or held.positions > base:
            return None
        return Gap(sequence_id, epoch, held.positions) if held.positions < base else held.storage

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        self._sequences.pop(sequence_id, None)

    def _at_epoch(self, sequence_id: int, epoch: int) -> _Held[Storage] | None:
        held = self._sequences.get(sequence_id)
        if held is None:
            held = self._sequences[sequence_id] = _Held(epoch, self._new_storage())
        if epoch > held.epoch:
            held = self._sequences[sequence_id] = _Held(epoch, self._new_storage())
        return held if epoch == held.epoch else None
