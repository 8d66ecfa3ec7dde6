"""Attention of a step's rows over paged KV, in torch: the CPU path and the reference of the GPU kernels.

Segments that have the same number of rows (trees: about the same) and a similar kv length share one call; their keys
and values are gathered block by block and padded to a common length. GQA groups are folded into the query length, so
keys and values are never expanded. A chain is causal; a node of a tree sees the prefix, the rows above it and itself.

A row's result has the bits of the plain decode row with the same tokens, measured with torch's CPU kernel (AVX-512, on
Intel's and AMD's):

- fp32: without exception up to 1,300 tokens, if the kv length is padded to a multiple of the key tile below, the last
  query block has queries enough for the head width (see _min_queries), and a tree's keys lie as `tree_layout` says;
- bf16: nearly, with keys in slot order. Of a layer's rows 1 (blocks) to 3 (trees) in 1,000 differ, in one element by
  one rounding; from 384 to 512 tokens, 1 in 100. What differs spreads through the layers above: of a 30-layer target's
  logits 94 % of a tree's rows were equal up to 330 tokens and 72 % up to 900, and all of the blocks' looked at. Laying
  keys out as in fp32 would gain a factor of three for more than twice the key gathers.

So in fp32 plain decoding, blocks and trees emit the same. In bf16 they do but for near-ties: a token can differ where
two are closer than such roundings move them.
"""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from verifier_service.step import SegmentRows
from verifier_service.tree_layout import TreeView, lay_out

_KEY_TILE = {torch.float32: 512}
_NODE_STRIDE = {torch.float32: 16}
"""Lanes of the vector unit the softmax is summed in; 1: nodes lie in slot order."""
_NODE_TILE = {torch.float32: 256}
"""Keys the matrix product sums in one go."""
_MANY_ROWS = 32
_QUERY_BLOCK = 32
"""Queries the kernel takes at once, or multiples of it."""


def _min_queries(head_dim: int, dtype: torch.dtype) -> int:
    """Queries of a block from which on their number does not change a query's bits: measured for head widths of 16 to
    1024. Below, the matrix product takes another way: on Intel's CPUs by the head width, on AMD's up to 11 queries."""
    return min(16, max(12, head_dim // 24 + 1)) if dtype == torch.float32 else 2


@dataclass(frozen=True)
class AttentionGroup:
    """Segments, or views of trees, that attend in one call."""

    rows: torch.Tensor | None
    """[members * rows_each] int64: indices into the step's flat rows, the last of a member repeated as padding; None
    for the step's first rows in order."""
    rows_each: int
    blocks: torch.Tensor
    """[members * blocks_each] int64: KV blocks, the padding block filling up shorter tables."""
    moved: tuple[torch.Tensor, torch.Tensor] | None
    """(columns, slots), int64: keys that lie elsewhere than the blocks put them, as indices into the gathered keys of
    all members [members * kv length] and the KV slots they come from."""
    mask: torch.Tensor
    """[members, 1, rows_each * heads per kv head, kv length]: 0 where a row may look, -inf elsewhere."""

    @property
    def members(self) -> int:
        return self.mask.shape[0]


@dataclass(frozen=True)
class _Member:
    first_row: int
    segment: SegmentRows
    view: TreeView | None
    """None: all rows, causal."""

    @property
    def rows(self) -> Items[int]:
        return self.view.rows if self.view else range(self.segment.rows)

    @property
    def length(self) -> int:
        return max(self.view.columns.values()) + 1 if self.view else self.segment.start + self.segment.rows


def plan_attention(
    segments: list[SegmentRows],
    block_tokens: int,
    heads_per_kv_head: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[AttentionGroup]:
    """Group a step's segments."""
    tile = math.lcm(_KEY_TILE.get(dtype, block_tokens), block_tokens)
    groups: dict[tuple[bool, int, int], list[_Member]] = {}
    first_row = 0
    for segment in segments:
        views: list[TreeView | None] = [None]
        if segment.parents:
            stride, node_tile = _NODE_STRIDE.get(dtype, 1), _NODE_TILE.get(dtype, 1 << 62)
            views = list(lay_out(segment.parents, segment.start, stride, node_tile))
        for view in views:
            member = _Member(first_row, segment, view)
            groups.setdefault(_group_key(member, tile), []).append(member)
        first_row += segment.rows
    fewest = _min_queries(head_dim, dtype)
    return [
        _group(members, tile, block_tokens, heads_per_kv_head, fewest, dtype, device) for members in groups.values()
    ]


def _group_key(member: _Member, tile: int) -> tuple[bool, int, int]:
    """Members with the same key share a call. Lengths, and sizes of trees, within a factor of two do: little is padded,
    few calls are made. A causal member of many rows is alone."""
    rows = len(member.rows)
    band = (-(-member.length // tile)).bit_length()
    if member.view:
        return True, rows.bit_length(), band
    return (False, rows, band) if rows <= _MANY_ROWS else (False, 0, member.segment.sequence_id)


def _group(
    members: list[_Member],
    tile: int,
    block_tokens: int,
    heads_per_kv_head: int,
    min_queries: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    rows_each = max(len(member.rows) for member in members)
    while 0 < rows_each * heads_per_kv_head % _QUERY_BLOCK < min_queries:
        rows_each += 1
    length = -(-max(member.length for member in members) // tile) * tile
    blocks = torch.zeros(len(members), length // block_tokens, dtype=torch.int64)
    rows: list[int] = []
    for i, member in enumerate(members):
        used = min(-(-(member.segment.start + member.segment.rows) // block_tokens), blocks.shape[1])
        blocks[i, :used] = torch.tensor(member.segment.blocks[:used])
        of_step = [member.first_row + row for row in member.rows]
        rows += of_step + of_step[-1:] * (rows_each - len(of_step))
    if members[0].view:
        hidden, moved = _tree_mask(members, rows_each, length, block_tokens)
    else:
        hidden, moved = _causal_mask(members, rows_each, length), None
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return AttentionGroup(
        rows=None if rows == list(range(len(rows))) else torch.tensor(rows).to(device),
        rows_each=rows_each,
        blocks=blocks.flatten().to(device),
        moved=(moved[0].to(device), moved[1].to(device)) if moved else None,
        mask=mask.repeat_interleave(heads_per_kv_head, dim=1)[:, None].to(device),
    )


def _causal_mask(members: list[_Member], rows_each: int, length: int) -> torch.Tensor:
    """[members, rows_each, length]: True where a row may not look. Padding rows see what the last row sees."""
    starts = torch.tensor([member.segment.start for member in members])
    offsets = torch.arange(rows_each).clamp_(max=len(members[0].rows) - 1)
    last_visible = starts[:, None] + offsets
    return torch.arange(length) > last_visible[:, :, None]


def _tree_mask(
    members: list[_Member], rows_each: int, length: int, block_tokens: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The same for views of trees, and what they move."""
    starts = torch.tensor([member.segment.start for member in members])
    hidden = (torch.arange(length) >= starts[:, None, None]).repeat(1, rows_each, 1)
    visible: list[int] = []
    columns: list[int] = []
    slots: list[int] = []
    for i, member in enumerate(members):
        assert member.view
        segment, view = member.segment, member.view
        paths: dict[int, list[int]] = {-1: []}
        for row, column in view.columns.items():
            paths[row] = [*paths[segment.parents[row]], column]
            position = segment.start + row
            if column != position:
                columns.append(i * length + column)
                slots.append(segment.blocks[position // block_tokens] * block_tokens + position % block_tokens)
        padded = view.rows + view.rows[-1:] * (rows_each - len(view.rows))
        for j, row in enumerate(padded):
            visible += [(i * rows_each + j) * length + column for column in paths[row]]
    hidden.view(-1)[torch.tensor(visible)] = False
    return hidden, (torch.tensor(columns), torch.tensor(slots)) if columns else None


def attend(q: torch.Tensor, kv: torch.Tensor, scale: float, groups: list[AttentionGroup]) -> torch.Tensor:
    """Attention of q [rows, heads, head_dim] over kv [blocks, block_tokens, 2, kv_heads, head_dim].

    Latent KV [blocks, block_tokens, 1, 1, head_dim] serves as keys and values at once: torch's CPU kernel takes only
    values as wide as the keys. Returns [rows, heads * head_dim]. Rows in no group (padding) are zero.
    """
    rows, heads, head_dim = q.shape
    kv_heads = kv.shape[3]
    results = []
    for group in groups:
        n, each = group.members, group.rows_each
        picked = q[: n * each] if group.rows is None else q.index_select(0, group.rows)
        folded = picked.view(n, each, kv_heads, -1, head_dim).transpose(1, 2).reshape(n, kv_heads, -1, head_dim)
        gathered = kv.index_select(0, group.blocks).flatten(0, 1)
        if group.moved:
            columns, slots = group.moved
            gathered.index_copy_(0, columns, kv.flatten(0, 1).index_select(0, slots))
        keys_and_values = gathered.unflatten(0, (n, -1)).permute(2, 0, 3, 1, 4)
        k, v = keys_and_values[0], keys_and_values[-1]
        result = F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask, scale=scale)
        results.append(result.view(n, kv_heads, each, -1, head_dim).transpose(1, 2).reshape(n * each, -1))
    if len(groups) == 1 and groups[0].rows is None:
        padding = rows - results[0].shape[0]
        return F.pad(results[0], (0, 0, 0, padding)) if padding else results[0]
    out = q.new_zeros(rows, heads * head_dim)
    for group, flat in zip(groups, results, strict=True):
        if group.rows is None:
            out[: flat.shape[0]] = flat
        else:
            out.index_copy_(0, group.rows, flat)
    return out
