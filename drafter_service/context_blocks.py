"""Who holds which blocks of the draft model's paged context. Pure bookkeeping: knows no tensors and no RPC."""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

PADDING_BLOCK = 0
"""Never handed out: padding rows write and read here."""

IDLE_SECONDS = 1.0
"""A context that was not used for so long makes room for others. Those of sequences that are being served do not: if
more are served than fit, some go without drafts, rather than all sending their contexts again and again."""


@dataclass(eq=False)
class PagedContext:
    """One sequence's blocks, in order of positions. They go back with the last reference to it."""

    blocks: list[int] = field(default_factory=list)
    used_at: float = 0.0
    dropped: bool = False
    """Its room was taken, or there was none: nothing of it is kept, and nothing will be."""


class ContextBlocks:
    """The blocks, and the contexts that hold them."""

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        on_drop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """blocks: the padding block included. on_drop: called once for every context that is dropped."""
        self.block_tokens = block_tokens
        self._total = blocks - 1
        self._free = list(range(blocks - 1, PADDING_BLOCK, -1))
        self._contexts: weakref.WeakSet[PagedContext] = weakref.WeakSet()
        self._clock = clock
        self._on_drop = on_drop

    @property
    def used(self) -> int:
        return self._total - len(self._free)

    def new_context(self) -> PagedContext:
        context = PagedContext(used_at=self._clock())
        # On the list, not on the context: that would keep it alive.
        weakref.finalize(context, self._take_back, context.blocks)
        self._contexts.add(context)
        return context

    def has_room(self, positions: int) -> bool:
        """Whether reserve would succeed for a new context."""
        idle = sum(len(context.blocks) for context in self._idle())
        return self._blocks_for(positions) <= len(self._free) + idle

    def reserve(self, context: PagedContext, positions: int) -> bool:
        """Have blocks for positions [0, positions), which marks the context as used. Other contexts that are idle are
        dropped for it, the one that is idle longest first. False if the context is dropped, before or now, because
        there is no room."""
        if context.dropped:
            return False
        context.used_at = self._clock()
        missing = self._blocks_for(positions) - len(context.blocks)
        idle = self._idle() if missing > len(self._free) else []
        if missing > len(self._free) + sum(len(other.blocks) for other in idle):
            self._drop(context)
            return False
        for other in idle:
            if missing > len(self._free):
                self._drop(other)
        context.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_tokens)

    def _idle(self) -> list[PagedContext]:
        before = self._clock() - IDLE_SECONDS
        idle = [context for context in self._contexts if context.blocks and context.used_at <= before]
        return sorted(idle, key=lambda context: context.used_at)

    def _drop(self, context: PagedContext) -> None:
        self._take_back(context.blocks)
        context.dropped = True
        self._on_drop()

    def _take_back(self, blocks: list[int]) -> None:
        self._free += blocks
        blocks.clear()
