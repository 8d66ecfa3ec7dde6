"""Accounting of paged KV blocks: allocation, reference counts, prefix reuse. Pure Python: knows no tensors.

Full blocks are registered under a hash chained over all tokens up to their end, so an equal hash means an equal prefix.
A block nobody holds stays registered until its room is needed, oldest first. A block remembers whether the features of
its tokens were kept: a sequence that will be drafted for reuses only blocks with features, since a drafter without the
prefix's features drafts badly.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

PADDING_BLOCK = 0
"""Never allocated: padding rows write and read here."""


@dataclass
class _Block:
    references: int = 0
    key: bytes | None = None
    """Chained hash while registered."""
    has_features: bool = False


@dataclass
class _Table:
    """Blocks of one sequence."""

    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Chained hashes of its full committed blocks."""


class KvCache:
    """Block tables of all sequences, by sequence id."""

    def __init__(self, blocks: int, block_tokens: int):
        self.block_tokens = block_tokens
        self._blocks = [_Block() for _ in range(blocks)]
        self._free = deque(range(PADDING_BLOCK + 1, blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[bytes, int] = {}
        self._tables: dict[int, _Table] = {}

    @property
    def total(self) -> int:
        return len(self._blocks) - 1

    @property
    def available(self) -> int:
        """Blocks that could be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def table(self, sequence_id: int) -> list[int]:
        return self._tables[sequence_id].blocks

    def open(self, sequence_id: int, tokens: Items[int], need_features: bool) -> int:
        """Start a table with the longest reusable prefix of `tokens`; returns its length in tokens.

        At least the last token is left out, since its row must be computed to choose the next one.
        """
        assert sequence_id not in self._tables
        table = self._tables[sequence_id] = _Table()
        key = b""
        for start in range(0, len(tokens) - self.block_tokens, self.block_tokens):
            key = self._chain(key, tokens[start : start + self.block_tokens])
            block = self._by_key.get(key)
            if block is None or (need_features and not self._blocks[block].has_features):
                break
            self._hold(block)
            table.blocks.append(block)
            table.keys.append(key)
        return len(table.blocks) * self.block_tokens

    def reserve(self, sequence_id: int, length: int) -> bool:
        """Grow the table to hold `length` tokens; False, with nothing changed, if there is no room."""
        table = self._tables[sequence_id]
        missing = self.blocks_for(length) - len(table.blocks)
        if missing > self.available:
            return False
        for _ in range(missing):
            block = self._take()
            self._hold(block)
            table.blocks.append(block)
        return True

    def commit(self, sequence_id: int, tokens: Items[int], committed: int, has_features: bool) -> None:
        """Register the blocks that tokens[:committed] fill, for reuse by others."""
        table = self._tables[sequence_id]
        for index in range(len(table.keys), committed // self.block_tokens):
            start = index * self.block_tokens
            key = self._chain(table.keys[-1] if table.keys else b"", tokens[start : start + self.block_tokens])
            table.keys.append(key)
            self._register(table.blocks[index], key, has_features)

    def close(self, sequence_id: int) -> None:
        """Give all blocks of a sequence back; registered ones stay reusable."""
        table = self._tables.pop(sequence_id)
        for block in reversed(table.blocks):
            self._drop(block)

    def audit(self, lengths: dict[int, int]) -> None:
        """AssertionError unless the books balance. `lengths`: tokens each open sequence must have room for."""
        assert set(lengths) == set(self._tables), "open tables differ from live sequences"
        counts = [0] * len(self._blocks)
        for sequence_id, table in self._tables.items():
            for block in table.blocks:
                counts[block] += 1
            room = len(table.blocks) * self.block_tokens
            assert room >= lengths[sequence_id], f"sequence {sequence_id}: room {room} < {lengths[sequence_id]}"
        assert counts[PADDING_BLOCK] == 0, "the padding block was allocated"
        for index, state in enumerate(self._blocks):
            assert state.references == counts[index], f"block {index}: {state.references} references, {counts[index]}"
            if state.key is not None:
                assert self._by_key[state.key] == index, f"block {index} is registered elsewhere"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        idle = {i for i, n in enumerate(counts) if n == 0 and i != PADDING_BLOCK}
        assert free | cached == idle, "blocks leaked"
        assert all(self._blocks[i].key is not None for i in cached), "a cached block is not registered"
        assert all(self._blocks[i].key is None for i in free), "a free block is registered"

    def _chain(self, parent: bytes, tokens: Items[int]) -> bytes:
        return hashlib.blake2b(parent + array("Q", tokens).tobytes(), digest_size=16).digest()

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block, _ = self._cached.popitem(last=False)
        self._unregister(block)
        return block

    def _hold(self, block: int) -> None:
        self._cached.pop(block, None)
        self._blocks[block].references += 1

    def _drop(self, block: int) -> None:
        state = self._blocks[block]
        state.references -= 1
        if state.references == 0:
            if state.key is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def _register(self, block: int, key: bytes, has_features: bool) -> None:
        other = self._by_key.get(key)
        if other is not None:
            if self._blocks[other].has_features or not has_features:
                return
            self._unregister(other)
            if self._blocks[other].references == 0:
                del self._cached[other]
                self._free.append(other)
        self._by_key[key] = block
        self._blocks[block].key = key
        self._blocks[block].has_features = has_features

    def _unregister(self, block: int) -> None:
        state = self._blocks[block]
        assert state.key is not None
        del self._by_key[state.key]
        state.key, state.has_features = None, False
