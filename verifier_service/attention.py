"""Attention of a step's rows over paged KV, in torch: the CPU path and the reference of the GPU kernels.

Segments that have the same number of rows and a similar kv length share one call; their keys and values are gathered
block by block and padded to a common length. GQA groups are folded into the query length, so keys and values are never
expanded.

A row's result has the same bits whatever shares its step: measured with torch's CPU kernel, this holds if the kv length
is padded to a multiple of the key tile below (fp32: without exception up to 1,300 tokens; bf16: but for rare crossings
from 384 to 512). Plain decoding and verification of a block then see equal logits, not merely close ones.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from verifier_service.step import Segment

_KEY_TILE = {torch.float32: 512}
_MANY_ROWS = 32


@dataclass(frozen=True)
class AttentionGroup:
    """Segments that attend in one call."""

    rows: torch.Tensor
    """[sequences * rows_each] int64: indices into the step's flat rows."""
    rows_each: int
    blocks: torch.Tensor
    """[sequences * blocks_each] int64: KV blocks, the padding block filling up shorter tables."""
    mask: torch.Tensor
    """[sequences, 1, rows_each * heads per kv head, kv length]: 0 where a row may look, -inf elsewhere."""

    @property
    def sequences(self) -> int:
        return self.mask.shape[0]


def plan_attention(
    segments: list[Segment], block_tokens: int, heads_per_kv_head: int, dtype: torch.dtype, device: torch.device
) -> list[AttentionGroup]:
    """Group a step's segments. Rows of a segment are causal: each sees the prefix and the rows before it."""
    tile = math.lcm(_KEY_TILE.get(dtype, block_tokens), block_tokens)
    groups: dict[tuple[int, int], list[tuple[int, Segment]]] = {}
    first_row = 0
    for segment in segments:
        length = segment.start + segment.rows
        padded = -(-length // tile)
        alone = segment.sequence.id if segment.rows > _MANY_ROWS else -1
        # Lengths within a factor of two share a call: little is padded, few calls are made.
        band = padded.bit_length() if alone < 0 else alone
        groups.setdefault((segment.rows if alone < 0 else 0, band), []).append((first_row, segment))
        first_row += segment.rows
    return [_group(members, tile, block_tokens, heads_per_kv_head, dtype, device) for members in groups.values()]


def _group(
    members: list[tuple[int, Segment]],
    tile: int,
    block_tokens: int,
    heads_per_kv_head: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    rows_each = members[0][1].rows
    starts = torch.tensor([segment.start for _, segment in members])
    length = -(-(int(starts.max()) + rows_each) // tile) * tile
    blocks = torch.zeros(len(members), length // block_tokens, dtype=torch.int64)
    for i, (_, segment) in enumerate(members):
        used = -(-(segment.start + rows_each) // block_tokens)
        blocks[i, :used] = torch.tensor(segment.blocks[:used])
    offsets = torch.arange(rows_each)
    last_visible = starts[:, None] + offsets
    hidden = torch.arange(length) > last_visible[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    rows = torch.tensor([first for first, _ in members])[:, None] + offsets
    return AttentionGroup(
        rows=rows.flatten().to(device),
        rows_each=rows_each,
        blocks=blocks.flatten().to(device),
        mask=mask.repeat_interleave(heads_per_kv_head, dim=1)[:, None].to(device),
    )


def attend(q: torch.Tensor, kv: torch.Tensor, groups: list[AttentionGroup]) -> torch.Tensor:
    """Attention of q [rows, heads, head_dim] over kv [blocks, block_tokens, 2, kv_heads, head_dim].

    Returns [rows, heads * head_dim]. Rows in no group (padding) are zero.
    """
    rows, heads, head_dim = q.shape
    kv_heads = kv.shape[3]
    results = []
    for group in groups:
        n, each = group.sequences, group.rows_each
        # One group holds the first rows in order: a slice serves.
        picked = q[: n * each] if len(groups) == 1 else q.index_select(0, group.rows)
        folded = picked.view(n, each, kv_heads, -1, head_dim).transpose(1, 2).reshape(n, kv_heads, -1, head_dim)
        gathered = kv.index_select(0, group.blocks).view(n, -1, 2, kv_heads, head_dim)
        k, v = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
        result = F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask)
        results.append(result.view(n, kv_heads, each, -1, head_dim).transpose(1, 2).reshape(n * each, -1))
    if len(groups) == 1:
        padding = rows - results[0].shape[0]
        return F.pad(results[0], (0, 0, 0, padding)) if padding else results[0]
    out = q.new_zeros(rows, heads * head_dim)
    for group, flat in zip(groups, results, strict=True):
        out.index_copy_(0, group.rows, flat)
    return out
