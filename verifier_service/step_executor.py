"""What every rank does in a step: rows to tensors, forward, and the moves of what was accepted, in its own KV."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from tandem.kernels.kv_compaction import kv_compaction
from tandem.kernels.paged_attention import paged_attention, rows_per_tile
from tandem.kernels.step_tables import TableShape
from verifier_service.attention import attend, plan_attention
from verifier_service.kv_cache import PADDING_BLOCK
from verifier_service.models.min_rows import MIN_ROWS
from verifier_service.models.target_model import Features, ForwardBatch, TargetModel
from verifier_service.step import SegmentRows
from verifier_service.step_inputs import InputShape, StepInputs

_KNOWN_SHAPES = 64


@dataclass(frozen=True)
class Computed:
    """The rows of a step after the last layer."""

    hidden: torch.Tensor
    """[rows, hidden], padding included."""
    routing: list[torch.Tensor]
    """Per mixture of experts [real rows, experts per token] int64."""


class StepExecutor:
    """The target, or one rank's part of it, with its KV pool."""

    def __init__(self, model: TargetModel, kv_blocks: int, block_tokens: int, device: torch.device):
        self.block_tokens = block_tokens
        self._model = model
        self._device = device
        self._by_tables = model.wants_tables or device.type == "cuda"
        self.min_rows = 1 if model.wants_tables else MIN_ROWS[model.dtype]
        shape = model.kv_shape(kv_blocks, block_tokens)
        self.kv = torch.zeros(model.layers, *shape, dtype=model.dtype, device=device)
        """[layers, blocks, block_tokens, ...]"""
        self._layers_kv = list(self.kv)
        self._known_shapes: dict[InputShape, tuple[torch.Tensor, StepInputs]] = {}
        self.rows_per_tile = rows_per_tile(model.heads_per_kv_head)

    def forward(self, segments: list[SegmentRows], features: Features | None = None) -> Computed:
        """All layers over all rows, and their features if they are wanted."""
        return Computed(self.run(self._batch(segments), features), self._model.routing)

    def run(self, batch: ForwardBatch, features: Features | None = None) -> torch.Tensor:
        """The model's forward over a batch and this rank's KV: hidden [rows, hidden]."""
        if features:
            return self._model.forward_with_features(batch, self._layers_kv, features)
        return self._model.forward(batch, self._layers_kv, ())[0]

    def logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """[at least len(rows), vocab]: logits of these rows, in order. With a split head every rank must call it."""
        if not rows:
            return hidden[:0]
        count = max(len(rows), self.min_rows)
        if count == hidden.shape[0] and rows == list(range(len(rows))):
            return self._model.logits(hidden)
        padded = rows + rows[-1:] * (count - len(rows))
        return self._model.logits(hidden.index_select(0, torch.tensor(padded).to(self._device)))

    def move(self, moves: list[tuple[int, int]]) -> None:
        """Copy keys and values of all layers between slots, (from, to): read all, then write all."""
        if moves:
            self.move_slots(*torch.tensor(moves).to(self._device).unbind(1))

    def move_slots(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """The same; slots are [moves] int32 or int64, on the device."""
        kv_compaction(self.kv.flatten(1, 2), sources, targets)

    def slots(self, blocks: list[int], start: int, count: int) -> torch.Tensor:
        """[count] int64, on the CPU: the KV slots of positions from `start` on, by a sequence's block table."""
        size = self.block_tokens
        first, last = start // size, (start + count - 1) // size
        table = np.array(blocks[first : last + 1])
        offsets = np.arange(start - first * size, start - first * size + count)
        return torch.from_numpy(table[offsets // size] * size + offsets % size)

    def _batch(self, segments: list[SegmentRows]) -> ForwardBatch:
        return self._tabled_batch(segments) if self._by_tables else self._grouped_batch(segments)

    def _tabled_batch(self, segments: list[SegmentRows]) -> ForwardBatch:
        """Rows in exactly as much room as they need."""
        tables = TableShape.holding(segments, self.rows_per_tile, self.block_tokens)
        rows, blocks = max(tables.rows, self.min_rows), 1 << (tables.blocks - 1).bit_length()
        shape = InputShape(replace(tables, rows=rows, blocks=blocks), 0)
        host, inputs = self._exact_inputs(shape)
        inputs.write(segments, self.block_tokens, (), ())
        if self._device.type != "cpu":
            inputs = StepInputs.over(host.to(self._device), shape)
        return self.table_batch(inputs)

    def _exact_inputs(self, shape: InputShape) -> tuple[torch.Tensor, StepInputs]:
        """A buffer on the host, kept: steps of few shapes follow each other, and its many views take 50 us."""
        known = self._known_shapes.get(shape)
        if known is None:
            if len(self._known_shapes) == _KNOWN_SHAPES:
                self._known_shapes.clear()
            arena = torch.empty(shape.size, dtype=torch.int32)
            known = self._known_shapes[shape] = arena, StepInputs.over(arena, shape)
        return known

    def table_batch(self, inputs: StepInputs) -> ForwardBatch:
        """The rows of these inputs, which are on the device."""
        token_ids, positions, slots = inputs.rows.long()
        tables, value_dim = inputs.tables, self._model.value_dim

        def attention(q: torch.Tensor, kv: torch.Tensor, scale: float) -> torch.Tensor:
            return paged_attention(q, kv, tables, scale, value_dim)

        return ForwardBatch(token_ids, positions, slots, attention, tables=tables)

    def _grouped_batch(self, segments: list[SegmentRows]) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        slots = []
        for segment in segments:
            token_ids += segment.token_ids
            positions += segment.positions
            slots.append(self.slots(segment.blocks, segment.start, segment.rows))
        padding = max(0, self.min_rows - len(token_ids))
        token_ids += [0] * padding
        positions += [0] * padding
        slots.append(torch.full((padding,), PADDING_BLOCK * self.block_tokens))
        model = self._model
        heads, head_dim = model.heads_per_kv_head, self.kv.shape[-1]
        groups = plan_attention(segments, self.block_tokens, heads, head_dim, model.dtype, self._device)
        return ForwardBatch(
            token_ids=torch.tensor(token_ids).to(self._device),
            positions=torch.tensor(positions).to(self._device),
            slots=torch.cat(slots).to(self._device),
            attention=partial(attend, groups=groups),
            padding=padding,
        )
