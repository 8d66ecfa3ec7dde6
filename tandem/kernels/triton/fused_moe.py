"""A grouped product over blocks of slots of one expert each: gate and up with their SwiGLU, then down, then the sum.

Weights are read once per block of slots; experts nobody went to are not read. What a slot's expert said is written to
memory and a last kernel adds up each row's slots in order: atomic adds would make a row's bits a matter of timing. That
is hidden elements per slot more to write and read: for 16 slots 2 % of the bytes of a Kimi K2 expert in INT4.
"""

from collections.abc import Mapping
from math import gcd

import torch
import triton
import triton.language as tl

from tandem.kernels.expert_sorting import ExpertBlocks
from tandem.kernels.expert_stack import ExpertStack, StackedLinears
from tandem.kernels.triton.expert_sorting import launch_sort_by_expert
from tandem.kernels.tuning import tuned
from tandem.layers.fp8_linear import BLOCK
from tandem.layers.int4_linear import GROUP

_FEW_SLOTS = 32
"""Slots per expert up to which reading weights takes longer than multiplying by them."""
_SUM_COLUMNS = 1024


def launch_fused_moe(
    x: torch.Tensor,
    experts: ExpertStack,
    weights: torch.Tensor,
    places: torch.Tensor,
    config: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """See tandem.kernels.fused_moe. config: block_rows, block_columns and block_k of a product's tile (slots, rows and
    columns of the weight), num_warps, num_stages.

    Tiles of 16 and of 32 slots sum alike, by the same instruction in the same order; from 64 on Hopper has another one.
    The default has only the first two, so that a row's bits do not change with the size of its step.
    """
    rows, hidden = x.shape
    slots, k = places.numel(), places.shape[1]
    shape_class = "few" if slots <= _FEW_SLOTS * experts.count else "many"
    config = config or tuned(f"fused_moe_{experts.gate_up.form}", shape_class, x.device)
    blocks = ExpertBlocks(*launch_sort_by_expert(places, experts.count, config["block_rows"]))
    inner = torch.empty((slots, experts.gate_up.values.shape[1] // 2), dtype=x.dtype, device=x.device)
    said = torch.empty((slots, hidden), dtype=x.dtype, device=x.device)
    _launch_product(x.contiguous(), k, experts.gate_up, blocks, inner, True, config)
    _launch_product(inner, 1, experts.down, blocks, said, False, config)
    total = torch.empty((rows, hidden), dtype=torch.float32, device=x.device)
    _add_up[(rows, triton.cdiv(hidden, _SUM_COLUMNS))](
        said, weights.contiguous(), places.contiguous(), total, hidden, experts.count, K=k, COLUMNS=_SUM_COLUMNS
    )
    return total


def _launch_product(
    x: torch.Tensor,
    slots_per_row: int,
    linears: StackedLinears,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    gated: bool,
    config: Mapping[str, int],
) -> None:
    columns, features = x.shape[1], out.shape[1]
    block_n, block_k = config["block_columns"], config["block_k"]
    if linears.form == "fp8":
        # A tile's columns share a scale.
        block_k = min(block_k, gcd(linears.first_column or BLOCK, BLOCK))
    tiles = triton.cdiv(features, block_n // 2 if gated else block_n)
    _product[(len(blocks.experts), tiles)](
        x,
        linears.values.view(torch.int32) if linears.form == "int4" else linears.values,
        linears.values if linears.scale is None else linears.scale,
        blocks.slots,
        blocks.experts,
        out,
        len(out),
        columns,
        features,
        0 if linears.scale is None else linears.scale.shape[-1],
        linears.first_column,
        SLOTS_PER_ROW=slots_per_row,
        FORM=linears.form,
        GATED=gated,
        WHOLE=columns % block_k == 0,
        GROUP=GROUP,
        SCALE_BLOCK=BLOCK,
        BLOCK_M=config["block_rows"],
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )


@triton.jit
def _product(
    x_ptr,
    values_ptr,
    scale_ptr,
    slots_ptr,
    experts_ptr,
    out_ptr,
    slot_count,
    columns,
    features,
    scale_columns,
    first_column,
    SLOTS_PER_ROW: tl.constexpr,
    FORM: tl.constexpr,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [slot_count, features] = each slot's row of x times its expert's weight; gated: silu(gate) * up of it. Blocks
    of one expert lie next to each other in the first grid axis, so that they find its weights in the cache."""
    block = tl.program_id(0)
    expert = tl.load(experts_ptr + block)
    if expert < 0:
        return
    slots = tl.load(slots_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = slots < slot_count
    # A block's first slot is real; the rows behind its last one repeat it and are not stored.
    x_rows = tl.where(real, slots, tl.load(slots_ptr + block * BLOCK_M)) // SLOTS_PER_ROW
    # Rows of gate and up alternate, so that a thread holds both parts of a feature.
    PARTS: tl.constexpr = 2 if GATED else 1
    TILE: tl.constexpr = BLOCK_N // PARTS
    n = tl.arange(0, BLOCK_N)
    feature = tl.minimum(tl.program_id(1) * TILE + n // PARTS, features - 1)
    w_rows = expert.to(tl.int64) * (features * PARTS) + n % PARTS * features + feature
    x_tile_ptr = x_ptr + x_rows.to(tl.int64)[:, None] * columns
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    for start in range(0, columns, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if WHOLE:
            x = tl.load(x_tile_ptr + k[None, :])
        else:
            x = tl.load(x_tile_ptr + k[None, :], mask=k[None, :] < columns, other=0.0)
        if FORM == "int4":
            GROUPS: tl.constexpr = BLOCK_K // GROUP
            word = start // 8 + tl.arange(0, BLOCK_K // 8)
            group = start // GROUP + tl.arange(0, GROUPS)
            words_ptr = values_ptr + w_rows[:, None] * (columns // 8) + word[None, :]
            scales_ptr = scale_ptr + w_rows[:, None] * scale_columns + group[None, :]
            if WHOLE:
                words = tl.load(words_ptr)
                scale = tl.load(scales_ptr)
            else:
                words = tl.load(words_ptr, mask=word[None, :] < columns // 8, other=0)
                scale = tl.load(scales_ptr, mask=group[None, :] < scale_columns, other=0.0)
            scale = tl.broadcast_to(scale[:, :, None], (BLOCK_N, GROUPS, GROUP // 4))
            scale = tl.reshape(scale, (BLOCK_N, BLOCK_K // 4))
            # Nibbles i and i + 4 of each word against every fourth column from i on: no weight changes places.
            x_even, x_odd = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_K // 4, 2, 2)))
            x_0, x_2 = tl.split(x_even)
            x_1, x_3 = tl.split(x_odd)
            acc = tl.dot(x_0, tl.trans(_nibbles(words, scale, x.dtype)), acc, input_precision="ieee")
            acc = tl.dot(x_1, tl.trans(_nibbles(words >> 4, scale, x.dtype)), acc, input_precision="ieee")
            acc = tl.dot(x_2, tl.trans(_nibbles(words >> 8, scale, x.dtype)), acc, input_precision="ieee")
            acc = tl.dot(x_3, tl.trans(_nibbles(words >> 12, scale, x.dtype)), acc, input_precision="ieee")
        else:
            w_ptr = values_ptr + w_rows[:, None] * columns + k[None, :]
            w = tl.load(w_ptr) if WHOLE else tl.load(w_ptr, mask=k[None, :] < columns, other=0.0)
            if FORM == "fp8":
                scale = tl.load(scale_ptr + w_rows * scale_columns + (first_column + start) // SCALE_BLOCK)
                acc += tl.dot(x, tl.trans(w.to(x.dtype)), input_precision="ieee") * scale[None, :]
            else:
                acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")

    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, TILE, 2)))
        acc = gate * tl.sigmoid(gate) * up
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    out = out_ptr + slots.to(tl.int64)[:, None] * features + at[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (at[None, :] < features))


@triton.jit
def _nibbles(words, scale, dtype: tl.constexpr):
    """(nibble - 8) * scale in `dtype` for the lowest nibble of each half of words [rows, words], one half after the
    other, rounded once: [rows, 2 * words]. scale: of that shape.

    As the lowest bits of a 16-bit float that is 128 (bf16) or 1024 (fp16) otherwise, a nibble needs no conversion, and
    both halves of a word take one instruction at each step. (Of the loop compiled for sm_90 with the default tile, 3.2
    instructions a weight are left of 8.5 with nibbles that are converted one by one.)
    """
    half: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    ONE: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
    bits = (words & 0x000F000F) | (0x43004300 if dtype == tl.bfloat16 else 0x64006400)
    pairs = tl.reshape(tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16)), scale.shape)
    levels = pairs.to(half, bitcast=True) - tl.full((), ONE + 8, half)
    if dtype == half and scale.dtype == half:
        return levels * scale
    return (levels.to(tl.float32) * scale.to(tl.float32)).to(dtype)


@triton.jit
def _add_up(said_ptr, weights_ptr, places_ptr, total_ptr, hidden, experts, K: tl.constexpr, COLUMNS: tl.constexpr):
    """total [rows, hidden]: of each row the weighted sum over its slots, in their order, without those not held."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(K):
        slot = row * K + choice
        if tl.load(places_ptr + slot) < experts:
            said = tl.load(said_ptr + slot * hidden + column, mask=column < hidden, other=0.0)
            total += said.to(tl.float32) * tl.load(weights_ptr + slot)
    tl.store(total_ptr + row * hidden + column, total, mask=column < hidden)
