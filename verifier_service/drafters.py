"""Which drafter drafts for which sequence, and what it has been sent. Pure Python: knows no tensors and no RPC.

A sequence's context lives in one drafter. `sent` counts the positions whose features (for an n-gram drafter: token ids)
it has been sent; what lies between `sent` and the committed length goes out with the next round. Prefill, resumption, a
new drafter and a drafter that asks again after a gap are all the same rule with another `sent`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.speculation import DraftSource, Round

FEATURE_CHUNK_BYTES = 2 * 2**20
"""Most bytes of contexts in one round: a long prompt's go in pieces, so that drafts are not stuck behind."""


@dataclass(eq=False)
class Drafter:
    """One connected drafter."""

    name: str
    send: Callable[[Round], None]
    """Hands a round to the connection; never blocks."""
    source: DraftSource = DraftSource.DFLASH
    """What it drafts with, and so what it is sent."""
    sent: dict[int, int] = field(default_factory=dict)
    """Per assigned sequence id: positions sent."""
    released: list[int] = field(default_factory=list)
    """Sequences to drop, told with the next round."""
    silent_until: float = 0.0
    """A draft came too late: nothing is asked before this time (time.perf_counter()) or the drafter's next answer."""
    pause_seconds: float = 1.0
    """How long the next silence lasts; doubles while the drafter stays late."""


class DrafterPool:
    """Connected drafters and their sequences."""

    def __init__(self) -> None:
        self.drafters: list[Drafter] = []
        self._holders: dict[int, Drafter] = {}

    def __len__(self) -> int:
        return len(self.drafters)

    def attach(self, drafter: Drafter) -> None:
        self.drafters.append(drafter)

    def detach(self, drafter: Drafter) -> list[int]:
        """Forget a drafter; returns the ids of the sequences it held."""
        if drafter in self.drafters:
            self.drafters.remove(drafter)
        orphans = list(drafter.sent)
        for sequence_id in orphans:
            del self._holders[sequence_id]
        drafter.sent.clear()
        return orphans

    def holder(self, sequence_id: int) -> Drafter | None:
        """The drafter a sequence is assigned to."""
        return self._holders.get(sequence_id)

    def of(self, sequence_id: int) -> Drafter | None:
        """The sequence's drafter; a new sequence is assigned to the one with the fewest."""
        drafter = self._holders.get(sequence_id)
        if drafter is None and self.drafters:
            drafter = min(self.drafters, key=lambda d: len(d.sent))
            self._holders[sequence_id] = drafter
            drafter.sent[sequence_id] = 0
        return drafter

    def restart(self, sequence_id: int) -> None:
        """Nothing counts as sent for this sequence any more."""
        drafter = self._holders.get(sequence_id)
        if drafter:
            drafter.sent[sequence_id] = 0

    def release(self, sequence_id: int) -> None:
        """The sequence ended; its drafter is told with the next round."""
        drafter = self._holders.pop(sequence_id, None)
        if drafter:
            del drafter.sent[sequence_id]
            drafter.released.append(sequence_id)
