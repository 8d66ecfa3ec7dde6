"""Pieces of the vocabulary first, then the pieces' best. A logit and its id make one integer that sorts as they do, so
each of the k is one maximum over a piece in registers."""

import torch
import triton
import triton.language as tl

from tandem.kernels.tuning import tuned

_NO_KEY = tl.constexpr(-(1 << 63))


def launch_top_k(
    logits: torch.Tensor, k: int, piece: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See tandem.kernels.top_k: (values, ids, log_sums). piece: columns of a piece, a power of two."""
    rows, vocab = logits.shape
    config = tuned("top_k", "any", logits.device)
    piece = piece or config["piece"]
    pieces = triton.cdiv(vocab, piece)
    device = logits.device
    keys = torch.empty((rows, pieces, k), dtype=torch.int64, device=device)
    tops = torch.empty((rows, pieces), dtype=torch.float32, device=device)
    sums = torch.empty((rows, pieces), dtype=torch.float32, device=device)
    _pieces[(rows, pieces)](
        logits, keys, tops, sums, vocab, logits.stride(0), K=k, PIECE=piece, num_warps=config["num_warps"]
    )
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    log_sums = torch.empty(rows, dtype=torch.float32, device=device)
    _merge[(rows,)](
        keys,
        tops,
        sums,
        values,
        ids,
        log_sums,
        pieces,
        K=k,
        KEYS=triton.next_power_of_2(pieces * k),
        PIECES=triton.next_power_of_2(pieces),
        num_warps=config["num_warps"],
    )
    return values, ids, log_sums


@triton.jit
def _pieces(logits_ptr, keys_ptr, tops_ptr, sums_ptr, vocab, row_stride, K: tl.constexpr, PIECE: tl.constexpr):
    """Of each piece its k largest as keys, its largest logit, and its sum of exponentials relative to that."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * PIECE + tl.arange(0, PIECE)
    inside = column < vocab
    # Adding zero makes -0 equal to 0, as it is where floats are compared.
    logits = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=-float("inf")).to(tl.float32) + 0.0
    top = tl.max(logits, axis=0)
    at = row * tl.num_programs(1) + piece
    tl.store(tops_ptr + at, top)
    tl.store(sums_ptr + at, tl.sum(tl.exp(logits - tl.where(top == -float("inf"), 0.0, top)), axis=0))
    # Floats sort as their bits do, negative ones backwards; of equals the lower id makes the larger key.
    bits = logits.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(inside, (order.to(tl.int64) << 32) | (0x7FFFFFFF - column), _NO_KEY)
    for place in range(K):
        key = tl.max(keys, axis=0)
        tl.store(keys_ptr + at * K + place, key)
        keys = tl.where(keys == key, _NO_KEY, keys)


@triton.jit
def _merge(
    keys_ptr,
    tops_ptr,
    sums_ptr,
    values_ptr,
    ids_ptr,
    log_sums_ptr,
    pieces,
    K: tl.constexpr,
    KEYS: tl.constexpr,
    PIECES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    tops = tl.load(tops_ptr + row * pieces + piece, mask=piece < pieces, other=-float("inf"))
    sums = tl.load(sums_ptr + row * pieces + piece, mask=piece < pieces, other=0.0)
    top = tl.max(tops, axis=0)
    tl.store(log_sums_ptr + row, top + tl.log(tl.sum(sums * tl.exp(tops - top), axis=0)))
    candidate = tl.arange(0, KEYS)
    keys = tl.load(keys_ptr + row * pieces * K + candidate, mask=candidate < pieces * K, other=_NO_KEY)
    for place in range(K):
        key = tl.max(keys, axis=0)
        order = (key >> 32).to(tl.int32)
        bits = order ^ ((order >> 31) & 0x7FFFFFFF)
        tl.store(values_ptr + row * K + place, bits.to(tl.float32, bitcast=True))
        tl.store(ids_ptr + row * K + place, 0x7FFFFFFF - (key & 0x7FFFFFFF))
        keys = tl.where(keys == key, _NO_KEY, keys)
