"""The integers of a draft step, side by side in one buffer: its rows, and what each kind of layer lets them look at."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from drafter_service.context_blocks import PADDING_BLOCK, PagedContext
from drafter_service.draft_model import BlockRequest
from tandem.checkpoints.draft_config import DraftConfig, DraftLayer
from tandem.kernels.paged_attention import rows_per_tile
from tandem.kernels.step_tables import WORD_BITS, StepTables, TableShape, length_of, pieces

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class InputShape:
    """How much a bucket's integers hold."""

    block: int
    """Rows of each request."""
    tables: dict[DraftLayer, TableShape]

    @classmethod
    def of(cls, config: DraftConfig, requests: int, blocks: int, block_tokens: int) -> "InputShape":
        """blocks: of the whole pool. One context may take them all."""
        block, tile = config.block_size, rows_per_tile(config.num_attention_heads // config.num_key_value_heads)
        tables = {}
        for layer in config.layers:
            words, table = 1, blocks
            if layer.window is not None:
                seen = layer.window - 1 + block
                words = -(-seen // WORD_BITS)
                table = min(blocks, 1 + -(-(seen - 1) // block_tokens))
            tables[layer] = TableShape(requests * block, requests, table, words, tile)
        return cls(block, tables)

    @property
    def rows(self) -> int:
        return next(iter(self.tables.values())).rows

    @property
    def parts(self) -> list[tuple[int, ...]]:
        return [(3, self.rows), *((shape.size,) for shape in self.tables.values())]

    @property
    def size(self) -> int:
        """Integers in all."""
        return length_of(self.parts)


@dataclass(frozen=True)
class DraftInputs:
    """Tensors, all int32 and views of one buffer."""

    block: int
    ids: torch.Tensor
    """[rows]"""
    positions: torch.Tensor
    """[rows]"""
    slots: torch.Tensor
    """[rows]: where each row's key and value are written."""
    tables: dict[DraftLayer, StepTables]
    """Without a window a row's prefix holds all it sees, the block included. With one its bits do: a window has two
    ends. Its block table and its positions then begin with the first block that the window reaches into, so that
    nothing before it costs anything."""

    @classmethod
    def over(cls, arena: torch.Tensor, shape: InputShape) -> "DraftInputs":
        """The first shape.size integers of arena [n] int32."""
        rows, *tables = pieces(arena, shape.parts)
        of_layers = {
            layer: StepTables.over(table, of) for (layer, of), table in zip(shape.tables.items(), tables, strict=True)
        }
        return cls(shape.block, rows[0], rows[1], rows[2], of_layers)

    def write(self, requests: Sequence[BlockRequest[PagedContext]], mask_token_id: int, block_tokens: int) -> None:
        """Describe these requests' blocks, in place; on the CPU. Rows behind theirs are padding."""
        count, block = len(requests), self.block
        rows = count * block
        bases = np.array([request.base for request in requests], np.int32)
        ids, positions, slots = self.ids.numpy(), self.positions.numpy(), self.slots.numpy()
        ids[:] = mask_token_id
        ids[:rows:block] = [request.anchor for request in requests]
        at = bases[:, None] + np.arange(block, dtype=np.int32)
        positions[:rows] = at.ravel()
        positions[rows:] = 0
        for request, first in zip(requests, range(0, rows, block), strict=True):
            where = positions[first : first + block]
            held = np.array(request.kv.blocks, np.int32)
            slots[first : first + block] = held[where // block_tokens] * block_tokens + where % block_tokens
        slots[rows:] = PADDING_BLOCK * block_tokens
        for layer, tables in self.tables.items():
            first_seen = np.zeros_like(bases) if layer.window is None else np.maximum(bases - layer.window + 1, 0)
            skipped = first_seen // block_tokens
            self._write_sequences(tables, requests, skipped)
            prefixes, ancestors = tables.prefixes.numpy(), tables.ancestors.numpy()
            prefixes.fill(0)
            ancestors.fill(0)
            starts = tables.tree_starts.numpy()
            starts.fill(0)
            last_seen = at if layer.causal else np.broadcast_to(at[:, -1:], at.shape)
            if layer.window is None:
                prefixes[:rows] = last_seen.ravel() + 1
                continue
            starts[:count] = first_seen - skipped * block_tokens
            begin = np.maximum(at - layer.window + 1, 0) - first_seen[:, None]
            end = np.minimum(last_seen + 1, at + layer.window) - first_seen[:, None]
            ancestors[:rows] = _bits(begin.ravel(), end.ravel(), ancestors.shape[1])

    def _write_sequences(
        self, tables: StepTables, requests: Sequence[BlockRequest[PagedContext]], skipped: Ints
    ) -> None:
        """Which rows belong to which request, and its blocks but for those skipped at the beginning."""
        count, rows = len(requests), len(requests) * self.block
        first_rows, block_tables = tables.first_rows.numpy(), tables.block_tables.numpy()
        first_rows[: count + 1] = np.arange(0, rows + 1, self.block)
        first_rows[count + 1 :] = rows
        block_tables.fill(PADDING_BLOCK)
        for s, request in enumerate(requests):
            used = request.kv.blocks[skipped[s] : skipped[s] + block_tables.shape[1]]
            block_tables[s, : len(used)] = used
        tiles = tables.tiles.numpy()
        tiles[:] = (-1, 0)
        firsts = np.arange(0, self.block, tables.rows_per_tile, dtype=np.int32)
        used_tiles = tiles[: count * len(firsts)]
        used_tiles[:, 0] = np.repeat(np.arange(count), len(firsts))
        used_tiles[:, 1] = (np.arange(0, rows, self.block)[:, None] + firsts).ravel()


def _bits(begin: Ints, end: Ints, words: int) -> Ints:
    """[rows, words] with the bits [begin, end) of each row set."""
    first = np.arange(0, words * WORD_BITS, WORD_BITS)
    low, high = (np.clip(x[:, None] - first, 0, WORD_BITS).astype(np.uint64) for x in (begin, end))
    one = np.uint64(1)
    return ((one << high) - (one << low)).astype(np.uint32).view(np.int32)
