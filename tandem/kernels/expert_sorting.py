"""Rows brought into the order of their experts, in blocks of one expert each: what a grouped product works through."""

from typing import NamedTuple

import torch


class ExpertBlocks(NamedTuple):
    """A slot is one row's way to one of its experts: slot i is choice i % k of row i // k."""

    slots: torch.Tensor
    """[blocks * block_rows] int32: each block's slots, ascending; rows * k where there is none."""
    experts: torch.Tensor
    """[blocks] int32: the expert of each block, ascending; -1 for the blocks behind the last one."""


def max_blocks(slots: int, experts: int, block_rows: int) -> int:
    """How many blocks so many slots can take at most, however they lie: an expert takes one for its first slot and one
    for every block_rows further ones. Known before the routing is, so that a launch has a fixed size."""
    woken = min(slots, experts)
    return woken + (slots - woken) // block_rows


def sort_by_expert(places: torch.Tensor, experts: int, block_rows: int) -> ExpertBlocks:
    """places [rows, k] int64: the expert of each slot; `experts` for those not held here, which take no block. An
    expert without slots takes none either. Nothing waits for the device."""
    if places.is_cuda:
        from tandem.kernels.triton.expert_sorting import launch_sort_by_expert

        return ExpertBlocks(*launch_sort_by_expert(places, experts, block_rows))
    return ExpertBlocks(*_reference(places, experts, block_rows))


def _reference(places: torch.Tensor, experts: int, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = places.flatten()
    count, device = len(flat), places.device
    blocks = max_blocks(count, experts, block_rows)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    block_ends = ((counts[:experts] + block_rows - 1) // block_rows).cumsum(0)
    of_block = torch.searchsorted(block_ends, torch.arange(blocks, device=device), right=True)
    order = flat.argsort(stable=True)
    expert = flat.index_select(0, order)
    # The first slot of an expert lies where the blocks of those before it end; the ones not held here lie at the end.
    first = torch.cat((block_ends.new_zeros(1), block_ends[:-1], block_ends.new_full((1,), blocks))) * block_rows
    rank = torch.arange(count, device=device) - (counts.cumsum(0) - counts).index_select(0, expert)
    at = (first.index_select(0, expert) + rank).clamp(max=blocks * block_rows)
    slots = torch.full((blocks * block_rows + 1,), count, device=device).scatter_(0, at, order)
    return slots[:-1].int(), torch.where(of_block < experts, of_block, -1).int()
