"""Random steps for attention kernels, and what attention should give for them, from a dense mask in float64."""

import random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch

from tandem.kernels.step_tables import StepTables


@dataclass
class Rows:
    """Rows of one sequence; parents as in StepTables."""

    start: int
    rows: int
    parents: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


def line(start: int, nodes: int) -> Rows:
    """A chain written as a tree: every row's ancestors are bits."""
    return Rows(start, nodes, list(range(-1, nodes - 1)))


def star(start: int, nodes: int) -> Rows:
    return Rows(start, nodes, [-1] + [0] * (nodes - 1))


def tree(start: int, nodes: int, seed: int = 0) -> Rows:
    chance = random.Random(seed)
    return Rows(start, nodes, [-1] + [chance.randrange(i) for i in range(1, nodes)])


@dataclass
class Case:
    """A step: queries, one layer's pool, tables, and the mask it stands for."""

    q: torch.Tensor
    kv: torch.Tensor
    tables: StepTables
    value_dim: int
    scale: float
    slots: list[torch.Tensor]
    """Per sequence the slots of its positions, in order."""
    visible: list[torch.Tensor]
    """Per sequence [rows, positions] bool."""

    def expected(self) -> torch.Tensor:
        """[rows, heads * value_dim] float64."""
        rows, heads, _ = self.q.shape
        out = torch.zeros(rows, heads, self.value_dim, dtype=torch.float64)
        row = 0
        for slots, visible in zip(self.slots, self.visible, strict=True):
            end = row + len(visible)
            flat = self.kv.flatten(0, 1).double().cpu()[slots]
            for head in range(heads):
                kv_head = head * self.kv.shape[3] // heads
                scores = self.q[row:end, head].double().cpu() @ flat[:, 0, kv_head].T * self.scale
                weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
                out[row:end, head] = weights @ flat[:, -1, kv_head, : self.value_dim]
            row = end
        return out.flatten(1)


def make_case(
    sequences: Items[Rows],
    *,
    heads: int,
    kv_heads: int = 1,
    key_dim: int = 16,
    value_dim: int | None = None,
    block_tokens: int = 16,
    rows_per_tile: int = 4,
    padding_rows: int = 0,
    padding_sequences: int = 0,
    words: int = 2,
    more_blocks: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """value_dim: given for latent KV. more_blocks: room in the block tables beyond what the longest sequence takes.

    KV that nobody may look at holds huge numbers, so that a key too many does not go unseen; queries and keys of a
    sequence depend on the seed and its place alone, blocks are shuffled."""
    latent = value_dim is not None
    lengths = [s.start + s.rows for s in sequences]
    widest = max([-(-n // block_tokens) for n in lengths], default=1) + more_blocks
    pool = list(range(1, 1 + sum(-(-n // block_tokens) for n in lengths)))
    random.Random(seed).shuffle(pool)
    shape = (1, 1, key_dim) if latent else (2, kv_heads, key_dim)
    kv = torch.full((len(pool) + 1, block_tokens, *shape), 1e4)
    real_rows = sum(s.rows for s in sequences)
    q = torch.full((real_rows + padding_rows, heads, key_dim), 3.0)
    slots, visible = [], []
    row = 0
    for place, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        used = -(-length // block_tokens)
        sequence.blocks = [pool.pop() for _ in range(used)]
        position = torch.arange(length)
        at = torch.tensor(sequence.blocks, dtype=torch.int64)[position // block_tokens] * block_tokens
        slots.append(at + position % block_tokens)
        random_numbers = torch.Generator().manual_seed(seed * 1000 + place)
        kv.view(-1, *shape)[slots[-1]] = torch.randn(length, *shape, generator=random_numbers)
        q[row : row + sequence.rows] = torch.randn(sequence.rows, heads, key_dim, generator=random_numbers)
        visible.append(_visible(sequence))
        row += sequence.rows
    tables = StepTables.allocate(
        len(q), len(sequences) + padding_sequences, widest, words, rows_per_tile, torch.device("cpu")
    )
    tables.write(sequences)
    if device != "cpu":
        tables = StepTables(**{k: v.to(device) if torch.is_tensor(v) else v for k, v in vars(tables).items()})
    width = value_dim if value_dim is not None else key_dim
    return Case(q.to(device, dtype), kv.to(device, dtype), tables, width, key_dim**-0.5, slots, visible)


def _visible(sequence: Rows) -> torch.Tensor:
    visible = torch.zeros(sequence.rows, sequence.start + sequence.rows, dtype=torch.bool)
    visible[:, : sequence.start] = True
    for row in range(sequence.rows):
        above = row
        if sequence.parents:
            while above >= 0:
                visible[row, sequence.start + above] = True
                above = sequence.parents[above]
        else:
            visible[row, sequence.start : sequence.start + row + 1] = True
    return visible
