"""Attention of a step's rows over paged KV, GQA and MLA, as StepTables describe what each row may look at.

All rows of a tile, with all the heads that share a key, read the prefix of their sequence once. Where it lies below
what every row of the tile sees no visibility is tested; behind that each row's prefix length and ancestor bits are. A
dense mask never exists. Keys are dealt to a number of splits that is fixed for a bucket and merged by the logarithms of
their sums (Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html): few rows keep a whole GPU busy.
"""

import torch

from tandem.kernels.step_tables import WORD_BITS, StepTables

_QUERIES_PER_TILE = 128
"""As many keep the matrix units busy while the keys arrive; more would take registers the accumulators need."""


def rows_per_tile(heads_per_kv_head: int) -> int:
    """How many rows a tile should have, whose heads look at the same keys."""
    return max(1, _QUERIES_PER_TILE // heads_per_kv_head)


def paged_attention(
    q: torch.Tensor, kv: torch.Tensor, tables: StepTables, scale: float, value_dim: int
) -> torch.Tensor:
    """[rows, heads * value_dim] in q's dtype; zeros where a row looks at nothing, padding rows among them.

    q [rows, heads, key_dim], any strides but the last. kv: one layer's pool, [blocks, block_tokens, 2, kv_heads,
    head_dim], key then value, or latents [blocks, block_tokens, 1, 1, key_dim], whose first value_dim dims are the
    values. Softmax and sums are in fp32. Shapes depend on the tables' capacity only; nothing waits for the device.
    """
    if q.is_cuda:
        from tandem.kernels.triton.paged_attention import launch_paged_attention

        return launch_paged_attention(q, kv, tables, scale, value_dim)
    return _reference(q, kv, tables, scale, value_dim)


def _reference(q: torch.Tensor, kv: torch.Tensor, tables: StepTables, scale: float, value_dim: int) -> torch.Tensor:
    """Tile by tile, each over all positions that its block table has room for, so a row's bits depend on its own
    sequence and the capacities alone."""
    rows, heads, _ = q.shape
    kv_heads = kv.shape[3]
    out = torch.zeros(rows + 1, heads * value_dim, dtype=q.dtype, device=q.device)
    for tile in tables.tiles.long():
        row, in_tile = _rows(tables, tile, rows)
        blocks = tables.block_tables.index_select(0, tile[:1].clamp(min=0))[0]
        of_sequence = kv.index_select(0, blocks.long()).flatten(0, 1).float()
        keys, values = of_sequence[:, 0], of_sequence[:, -1, :, :value_dim]
        # [kv_heads, rows_per_tile * heads per kv head, key_dim]
        folded = q.index_select(0, row).float().unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        scores = folded @ keys.permute(1, 2, 0) * scale
        visible = _visible(tables, tile, row, len(keys)) & in_tile[:, None]
        hidden = ~visible.repeat_interleave(heads // kv_heads, dim=0)
        scores = scores.masked_fill_(hidden, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)).exp_()
        total = weights.sum(-1, keepdim=True)
        attended = weights @ values.transpose(0, 1) / torch.where(total > 0, total, 1)
        flat = attended.unflatten(1, (len(row), -1)).transpose(0, 1).flatten(1)
        out.index_copy_(0, torch.where(in_tile, row, rows), flat.to(q.dtype))
    return out[:rows]


def _rows(tables: StepTables, tile: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows_per_tile]: the tile's rows, and which of them are rows of its sequence."""
    row = tile[1] + torch.arange(tables.rows_per_tile, device=tile.device)
    end = tables.first_rows.index_select(0, tile[:1].clamp(min=0) + 1)
    return row.clamp(max=rows - 1), (tile[0] >= 0) & (row < end)


def _visible(tables: StepTables, tile: torch.Tensor, row: torch.Tensor, positions: int) -> torch.Tensor:
    """[rows_per_tile, positions] bool."""
    position = torch.arange(positions, device=tile.device)
    in_prefix = position < tables.prefixes.index_select(0, row)[:, None]
    words = tables.ancestors.shape[1]
    if not words:
        return in_prefix
    bit = position - tables.tree_starts.index_select(0, tile[:1].clamp(min=0))
    word = tables.ancestors.index_select(0, row).index_select(1, (bit // WORD_BITS).clamp(0, words - 1))
    is_ancestor = (word >> bit % WORD_BITS) & 1
    return in_prefix | ((bit >= 0) & (bit < words * WORD_BITS) & (is_ancestor == 1))
