"""One program per expert: it counts all slots, so that it knows where its blocks begin, and lists its own in order.
No atomics: the order is the same every time."""

import torch
import triton
import triton.language as tl

from tandem.kernels.expert_sorting import max_blocks

_THREADS = 128
"""No fewer slots at once: a histogram counts what several threads hold alike."""


def launch_sort_by_expert(
    places: torch.Tensor, experts: int, block_rows: int, chunk: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tandem.kernels.expert_sorting: (slots, experts of blocks). chunk: slots looked at at once."""
    count = places.numel()
    blocks = max_blocks(count, experts, block_rows)
    slots = torch.empty(blocks * block_rows, dtype=torch.int32, device=places.device)
    of_block = torch.empty(blocks, dtype=torch.int32, device=places.device)
    # The last program is that of the blocks nobody takes.
    _sort[(experts + 1,)](
        places.contiguous(),
        slots,
        of_block,
        count,
        blocks,
        experts,
        BINS=triton.next_power_of_2(experts + 1),
        BLOCK_ROWS=block_rows,
        CHUNK=min(chunk, max(_THREADS, triton.next_power_of_2(count))),
        num_warps=_THREADS // 32,
    )
    return slots, of_block


@triton.jit
def _sort(
    places_ptr,
    slots_ptr,
    of_block_ptr,
    count,
    blocks,
    experts,
    BINS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    place = tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, count, CHUNK):
        slot = start + place
        expert = tl.load(places_ptr + slot, mask=slot < count, other=experts).to(tl.int32)
        counts += tl.histogram(expert, BINS)
    taken = tl.where(bins < experts, (counts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    first = tl.sum(tl.where(bins < mine, taken, 0), axis=0)
    if mine == experts:
        for start in range(0, blocks - first, CHUNK):
            block = first + start + place
            tl.store(of_block_ptr + block, tl.full((CHUNK,), -1, tl.int32), mask=block < blocks)
        for start in range(first * BLOCK_ROWS, blocks * BLOCK_ROWS, CHUNK):
            at = start + place
            tl.store(slots_ptr + at, tl.zeros((CHUNK,), tl.int32) + count, mask=at < blocks * BLOCK_ROWS)
    else:
        held = tl.sum(tl.where(bins == mine, taken, 0), axis=0)
        for start in range(0, held, CHUNK):
            block = start + place
            tl.store(of_block_ptr + first + block, tl.zeros((CHUNK,), tl.int32) + mine, mask=block < held)
        at = first * BLOCK_ROWS
        for start in range(0, count, CHUNK):
            slot = start + place
            expert = tl.load(places_ptr + slot, mask=slot < count, other=experts).to(tl.int32)
            is_mine = (expert == mine).to(tl.int32)
            rank = tl.cumsum(is_mine, axis=0) - is_mine
            tl.store(slots_ptr + at + rank, slot, mask=is_mine > 0)
            at += tl.sum(is_mine, axis=0)
        for start in range(0, (first + held) * BLOCK_ROWS - at, CHUNK):
            gap = at + start + place
            tl.store(slots_ptr + gap, tl.zeros((CHUNK,), tl.int32) + count, mask=gap < (first + held) * BLOCK_ROWS)
