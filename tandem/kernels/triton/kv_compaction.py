"""One program per layer and few columns holds all moves in registers, so that it reads all before it writes any."""

import torch
import triton
import triton.language as tl

_ELEMENTS = 16384
"""A program holds so many."""
_MAX_COLUMNS = 512


def launch_kv_compaction(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See tandem.kernels.kv_compaction."""
    if not len(sources):
        return
    pool = pool.view(*pool.shape[:2], -1)
    layers, _, width = pool.shape
    moves = triton.next_power_of_2(len(sources))
    columns = min(triton.next_power_of_2(width), _MAX_COLUMNS, max(8, _ELEMENTS // moves))
    _move[(triton.cdiv(width, columns), layers)](
        pool,
        sources,
        targets,
        len(sources),
        width,
        pool.stride(0),
        pool.stride(1),
        sources.stride(0),
        targets.stride(0),
        MOVES=moves,
        COLUMNS=columns,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["sources_ptr", "targets_ptr", "moves", "stride_source", "stride_target"])
def _move(
    pool_ptr,
    sources_ptr,
    targets_ptr,
    moves,
    width,
    stride_layer,
    stride_slot,
    stride_source,
    stride_target,
    MOVES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    move = tl.arange(0, MOVES)
    source = tl.load(sources_ptr + move * stride_source, mask=move < moves, other=0).to(tl.int64)
    target = tl.load(targets_ptr + move * stride_target, mask=move < moves, other=0).to(tl.int64)
    mask = (source != target)[:, None] & (column < width)[None, :]
    layer_ptr = pool_ptr + tl.program_id(1).to(tl.int64) * stride_layer
    values = tl.load(layer_ptr + source[:, None] * stride_slot + column[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(layer_ptr + target[:, None] * stride_slot + column[None, :], values, mask=mask)
