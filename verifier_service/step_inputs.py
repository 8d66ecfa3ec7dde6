"""The integers of a step, side by side in one buffer, so that one copy brings them to the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from tandem.kernels.step_tables import StepTables, TableShape, pieces
from verifier_service.kv_cache import PADDING_BLOCK
from verifier_service.step import SegmentRows


@dataclass(frozen=True)
class InputShape:
    """How much inputs hold."""

    tables: TableShape
    choosing: int
    """Rows that choose a token."""

    @property
    def size(self) -> int:
        """Integers in all."""
        return 3 * self.tables.rows + 2 * self.choosing + self.tables.sequences + self.tables.size


@dataclass(frozen=True)
class StepInputs:
    """Tensors, all int32 and views of one buffer."""

    rows: torch.Tensor
    """[3, rows]: token ids, positions and KV slots."""
    choosing: torch.Tensor
    """[choosing]: the rows that choose a token, ascending; padding repeats row 0."""
    parents: torch.Tensor
    """[choosing]: of a draft node the index in `choosing` of the row above it, otherwise -1."""
    roots: torch.Tensor
    """[sequences]: of a sequence whose draft is walked along its largest logits the index in `choosing` of the row
    before the first node, otherwise -1."""
    tables: StepTables

    @classmethod
    def over(cls, arena: torch.Tensor, shape: InputShape) -> "StepInputs":
        """The first shape.size integers of arena [n] int32."""
        t = shape.tables
        parts = ((3, t.rows), (shape.choosing,), (shape.choosing,), (t.sequences,), (t.size,))
        rows, choosing, parents, roots, tables = pieces(arena, parts)
        return cls(rows, choosing, parents, roots, StepTables.over(tables, t))

    def write(
        self, segments: Sequence[SegmentRows], block_tokens: int, logit_rows: Sequence[int], greedy: Sequence[bool]
    ) -> None:
        """Describe a step, in place; on the CPU. Rows behind the last stand for nothing: they go to the padding block.

        logit_rows: rows of the step that choose, ascending: of a segment its last ones. greedy: per segment whether its
        draft is walked; a segment that chooses nothing is not.
        """
        token_ids, positions, slots = self._row_arrays
        row = 0
        for segment in segments:
            end = row + segment.rows
            token_ids[row:end] = segment.token_ids
            at = np.arange(segment.start, segment.start + segment.rows)
            positions[row:end] = segment.positions if segment.parents else at
            first = segment.start // block_tokens
            table = np.array(segment.blocks[first : at[-1] // block_tokens + 1])
            slots[row:end] = table[at // block_tokens - first] * block_tokens + at % block_tokens
            row = end
        token_ids[row:] = positions[row:] = 0
        slots[row:] = PADDING_BLOCK * block_tokens
        self.tables.write(segments)
        if self.choosing.shape[0]:
            self._write_choosing(segments, logit_rows, greedy)

    @cached_property
    def _row_arrays(self) -> np.ndarray:
        return self.rows.numpy()

    def _write_choosing(
        self, segments: Sequence[SegmentRows], logit_rows: Sequence[int], greedy: Sequence[bool]
    ) -> None:
        choosing, parents, roots = self.choosing.numpy(), self.parents.numpy(), self.roots.numpy()
        choosing[: len(logit_rows)] = logit_rows
        choosing[len(logit_rows) :] = 0
        parents.fill(-1)
        roots.fill(-1)
        row = first = 0
        for s, segment in enumerate(segments):
            end = row + segment.rows
            last = first
            while last < len(logit_rows) and logit_rows[last] < end:
                last += 1
            if last > first and greedy[s]:
                # `above` counts the segment's rows, `before` how many of them do not choose.
                before = segment.rows - (last - first)
                above = segment.parents[before + 1 :] if segment.parents else range(before, segment.rows - 1)
                parents[first + 1 : last] = [first + parent - before for parent in above]
                roots[s] = first
            row, first = end, last
