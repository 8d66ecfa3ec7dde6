"""What each row of a step may look at: the one description that attention kernels read, in buffers of fixed size.

Rows of a sequence lie next to each other. A row sees a prefix of its sequence's positions and, in a tree, some of the
positions from `tree_starts` on, one bit each. Plain tokens, chains and prompts need no bits: their prefix ends with the
row itself. Rows behind the last sequence's are padding: attention leaves zeros there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

WORD_BITS = 32


class Rows(Protocol):
    """The rows of one sequence in a step."""

    @property
    def start(self) -> int:
        """Position of the first row, which is how many positions are in the KV already."""
        ...

    @property
    def rows(self) -> int: ...

    @property
    def parents(self) -> list[int]:
        """Of each row the row above it, an earlier one, -1 for the first; empty where every row sees all before it."""
        ...

    @property
    def blocks(self) -> list[int]:
        """The sequence's KV block table, with room for all rows."""
        ...


@dataclass(frozen=True)
class TableShape:
    """How much tables hold."""

    rows: int
    sequences: int
    blocks: int
    """Per sequence."""
    words: int
    """Per row."""
    rows_per_tile: int

    @classmethod
    def holding(cls, sequences: Sequence[Rows], rows_per_tile: int, block_tokens: int) -> "TableShape":
        """Exactly these sequences, blocks only as far as positions lie in them."""
        return cls(
            rows=sum(s.rows for s in sequences),
            sequences=len(sequences),
            blocks=max(-(-(s.start + s.rows) // block_tokens) for s in sequences),
            words=max(words_of(s) for s in sequences),
            rows_per_tile=rows_per_tile,
        )

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of StepTables' tensors, in order."""
        tiles = self.sequences + -(-self.rows // self.rows_per_tile)
        return (
            (self.sequences + 1,),
            (self.rows,),
            (self.sequences,),
            (self.rows, self.words),
            (self.sequences, self.blocks),
            (tiles, 2),
        )

    @property
    def size(self) -> int:
        """Integers in all."""
        return length_of(self.parts)


@dataclass(frozen=True)
class StepTables:
    """Tensors, all int32 and on one device."""

    first_rows: torch.Tensor
    """[sequences + 1]: rows of sequence s are [first_rows[s], first_rows[s + 1]); a sequence may have none."""
    prefixes: torch.Tensor
    """[rows]: the row sees positions [0, prefix) of its sequence."""
    tree_starts: torch.Tensor
    """[sequences]: the position that the first bit of its rows' ancestors stands for."""
    ancestors: torch.Tensor
    """[rows, words]: bit b of word w: the row also sees position tree_start + 32 * w + b. The row itself is included,
    by its prefix or by its bit."""
    block_tables: torch.Tensor
    """[sequences, blocks]: KV blocks in order of positions."""
    tiles: torch.Tensor
    """[tiles, 2]: (sequence, first row of the step) of each run of at most rows_per_tile rows of one sequence; sequence
    -1 where there is none."""
    rows_per_tile: int

    @classmethod
    def allocate(
        cls, rows: int, sequences: int, blocks: int, words: int, rows_per_tile: int, device: torch.device
    ) -> "StepTables":
        """Tables without any sequence, for up to so many rows, sequences, blocks per sequence and words per row."""
        shape = TableShape(rows, sequences, blocks, words, rows_per_tile)
        tables = cls.over(torch.zeros(shape.size, dtype=torch.int32, device=device), shape)
        tables.tiles[:, 0] = -1
        return tables

    @classmethod
    def over(cls, arena: torch.Tensor, shape: TableShape) -> "StepTables":
        """Tables that are the first shape.size integers of arena [n] int32, whatever those are: with a twin on the
        host that is written, one copy brings them to the device."""
        first_rows, prefixes, tree_starts, ancestors, block_tables, tiles = pieces(arena, shape.parts)
        return cls(first_rows, prefixes, tree_starts, ancestors, block_tables, tiles, shape.rows_per_tile)

    @property
    def shape(self) -> TableShape:
        rows, words = self.ancestors.shape
        sequences, blocks = self.block_tables.shape
        return TableShape(rows, sequences, blocks, words, self.rows_per_tile)

    def write(self, sequences: Sequence[Rows]) -> None:
        """Describe these sequences' rows, in place. Nothing of what was there before is left."""
        if self.prefixes.device.type != "cpu":
            mine = self.shape
            host = StepTables.over(torch.empty(mine.size, dtype=torch.int32), mine)
            host.write(sequences)
            for name in ("first_rows", "prefixes", "tree_starts", "ancestors", "block_tables", "tiles"):
                getattr(self, name).copy_(getattr(host, name))
            return
        first_rows, prefixes, tree_starts, ancestors, block_tables, tile_table = self._arrays
        ancestors.fill(0)
        block_tables.fill(0)
        first_rows[0] = row = 0
        tiles: list[tuple[int, int]] = []
        for s, sequence in enumerate(sequences):
            end = row + sequence.rows
            prefixes[row:end] = np.arange(sequence.start + 1, sequence.start + sequence.rows + 1)
            tree_starts[s] = 0
            if sequence.parents:
                shared = _shared(sequence.parents)
                prefixes[row + shared : end] = tree_starts[s] = sequence.start + shared
                for i, parent in enumerate(sequence.parents[shared:]):
                    if parent >= shared:
                        ancestors[row + shared + i] = ancestors[row + parent]
                    ancestors[row + shared + i, i // WORD_BITS] |= np.uint32(1 << i % WORD_BITS)
            used = sequence.blocks[: block_tables.shape[1]]
            block_tables[s, : len(used)] = used
            tiles += [(s, first) for first in range(row, end, self.rows_per_tile)]
            row = end
            first_rows[s + 1] = row
        first_rows[len(sequences) + 1 :] = row
        prefixes[row:] = 0
        tree_starts[len(sequences) :] = 0
        tile_table[: len(tiles)] = np.array(tiles, np.int32).reshape(-1, 2)
        tile_table[len(tiles) :] = (-1, 0)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        """The tensors as numpy sees them, kept: steps write the same tables again and again. Ancestors are uint32."""
        tensors = (self.first_rows, self.prefixes, self.tree_starts, self.ancestors, self.block_tables, self.tiles)
        arrays = [tensor.numpy() for tensor in tensors]
        arrays[3] = arrays[3].view(np.uint32)
        return tuple(arrays)


def length_of(shapes: Iterable[tuple[int, ...]]) -> int:
    """Of the arena that pieces() cuts into these."""
    return sum(map(math.prod, shapes))


def pieces(arena: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Views of arena [n], one after another."""
    views = []
    start = 0
    for shape in shapes:
        size = math.prod(shape)
        views.append(arena[start : start + size].view(shape))
        start += size
    return views


def words_of(sequence: Rows) -> int:
    """Words that each of its rows needs, at least 1."""
    return max(1, -(-(sequence.rows - _shared(sequence.parents)) // WORD_BITS)) if sequence.parents else 1


def _shared(parents: list[int]) -> int:
    """Rows that all later ones see, a chain from the first on: they need no bits. A tree's rows all descend from the
    lowest row that anything branches off."""
    branches = (parent for row, parent in enumerate(parents) if row and parent != row - 1)
    return 1 + min(branches, default=len(parents) - 1)
