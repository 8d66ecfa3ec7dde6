"""Sums over pieces of the vocabulary, then one program per row that looks for the token in the piece it falls into."""

import torch
import triton
import triton.language as tl

from tandem.kernels.tuning import tuned


def launch_sample(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor, piece: int | None = None
) -> torch.Tensor:
    """See tandem.kernels.sampling. piece: columns of a piece, a power of two."""
    rows, vocab = logits.shape
    config = tuned("sampling", "any", logits.device)
    piece = piece or config["piece"]
    pieces = triton.cdiv(vocab, piece)
    device = logits.device
    tops = torch.empty((rows, pieces), dtype=torch.float32, device=device)
    largest = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    sums = torch.empty((rows, pieces), dtype=torch.float64, device=device)
    chosen = torch.empty(rows, dtype=torch.int64, device=device)
    stride, warps = logits.stride(0), config["num_warps"]
    _pieces[(rows, pieces)](logits, temperatures, tops, largest, sums, vocab, stride, PIECE=piece, num_warps=warps)
    _choose[(rows,)](
        logits,
        temperatures,
        uniforms,
        tops,
        largest,
        sums,
        chosen,
        vocab,
        stride,
        pieces,
        PIECE=piece,
        PIECES=triton.next_power_of_2(pieces),
        num_warps=warps,
    )
    return chosen


@triton.jit
def _scaled(logits_ptr, row, row_stride, column, vocab, temperature):
    """logits / temperature in fp32, as they are where it is 0; -inf behind the last column."""
    logits = tl.load(logits_ptr + row * row_stride + column, mask=column < vocab, other=-float("inf"))
    return tl.div_rn(logits.to(tl.float32), tl.where(temperature == 0, 1.0, temperature))


@triton.jit
def _pieces(logits_ptr, temperatures_ptr, tops_ptr, largest_ptr, sums_ptr, vocab, row_stride, PIECE: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * PIECE + tl.arange(0, PIECE)
    scaled = _scaled(logits_ptr, row, row_stride, column, vocab, tl.load(temperatures_ptr + row))
    top = tl.max(scaled, axis=0)
    at = row * tl.num_programs(1) + piece
    tl.store(tops_ptr + at, top)
    tl.store(largest_ptr + at, tl.min(tl.where(scaled == top, column, vocab), axis=0))
    weights = tl.exp(scaled - tl.where(top == -float("inf"), 0.0, top)).to(tl.float64)
    tl.store(sums_ptr + at, tl.sum(weights, axis=0))


@triton.jit
def _choose(
    logits_ptr,
    temperatures_ptr,
    uniforms_ptr,
    tops_ptr,
    largest_ptr,
    sums_ptr,
    chosen_ptr,
    vocab,
    row_stride,
    pieces,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    piece = tl.arange(0, PIECES)
    at = row * pieces + piece
    tops = tl.load(tops_ptr + at, mask=piece < pieces, other=-float("inf"))
    top = tl.max(tops, axis=0)
    if temperature == 0:
        largest = tl.load(largest_ptr + at, mask=(piece < pieces) & (tops == top), other=vocab)
        tl.store(chosen_ptr + row, tl.min(largest, axis=0).to(tl.int64))
    else:
        sums = tl.load(sums_ptr + at, mask=piece < pieces, other=0.0) * tl.exp(tops - top).to(tl.float64)
        ends = tl.cumsum(sums, axis=0)
        target = tl.load(uniforms_ptr + row) * tl.sum(sums, axis=0)
        # Rounding may leave the target at the very end of what was summed: then it is the last token with any weight.
        last = tl.max(tl.where(sums > 0, piece, 0), axis=0)
        mine = tl.minimum(tl.sum((ends <= target).to(tl.int32), axis=0), last)
        before = tl.sum(tl.where(piece < mine, sums, 0.0), axis=0)
        column = mine * PIECE + tl.arange(0, PIECE)
        scaled = _scaled(logits_ptr, row, row_stride, column, vocab, temperature)
        weights = tl.exp(scaled - tl.load(tops_ptr + row * pieces + mine)).to(tl.float64)
        weights *= tl.exp(tl.load(tops_ptr + row * pieces + mine) - top).to(tl.float64)
        passed = tl.sum((before + tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
        last_column = tl.max(tl.where(weights > 0, column, 0), axis=0)
        tl.store(chosen_ptr + row, tl.minimum(mine * PIECE + passed, last_column).to(tl.int64))
