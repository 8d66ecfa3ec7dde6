"""The kernels of paged attention.

Queries of a tile are its rows times the heads that share a key: query i is head i % GROUP of row i // GROUP. A program
takes up to QUERIES of them: MLA with many heads needs several programs per tile. A tile of few queries, as in plain
decoding in a bucket that has room for trees, takes a smaller matrix product. A split's keys are a run of positions
whose length follows from how far the tile sees, so short sequences use few splits and the launch stays the same.
"""

import triton
import triton.language as tl

_OF_A_BUCKET = [
    *("tiles_ptr", "first_rows_ptr", "prefixes_ptr", "tree_starts_ptr", "ancestors_ptr", "tables_ptr", "rows"),
    *("sequences", "stride_ancestors", "stride_table", "rows_per_tile", "groups", "splits", "words"),
]
"""Not specialised: numbers of a bucket, and tables that lie anywhere in a buffer, need no kernel of their own."""


@triton.jit(do_not_specialize=_OF_A_BUCKET)
def attend(
    q_ptr,
    kv_ptr,
    results_ptr,
    sums_ptr,
    tiles_ptr,
    first_rows_ptr,
    prefixes_ptr,
    tree_starts_ptr,
    ancestors_ptr,
    tables_ptr,
    scale,
    rows,
    sequences,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_token,
    stride_value,
    stride_kv_head,
    stride_ancestors,
    stride_table,
    rows_per_tile,
    groups,
    splits,
    words,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    LATENT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    QUERIES: tl.constexpr,
    FEW_QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """scale: times log2(e), since exponentials are of base 2. results [rows, HEADS, splits, VALUE_DIM] and sums [rows,
    HEADS, splits], each split's log2 of its sum. WHOLE: there is one split, its results are the attention's and sums
    is not written."""
    kv_head = tl.program_id(0) // groups
    first_query = tl.program_id(0) % groups * QUERIES
    tile = tl.program_id(2)
    sequence = tl.load(tiles_ptr + tile * 2)
    first_row = tl.load(tiles_ptr + tile * 2 + 1)
    if WHOLE:
        # There are at least as many tiles as runs of rows_per_tile rows: each clears the padding rows of one run.
        query = first_query + tl.arange(0, QUERIES)
        row = tile * rows_per_tile + query // GROUP
        padding = (row >= tl.load(first_rows_ptr + sequences)) & (row < rows)
        column = tl.arange(0, VALUES)
        at = (row.to(tl.int64) * HEADS + kv_head * GROUP + query % GROUP) * VALUE_DIM
        zeros = tl.zeros([QUERIES, VALUES], results_ptr.dtype.element_ty)
        tl.store(results_ptr + at[:, None] + column[None, :], zeros, padding[:, None] & (column < VALUE_DIM)[None, :])
    if sequence >= 0:
        end_row = tl.minimum(tl.load(first_rows_ptr + sequence + 1), first_row + rows_per_tile)
        kv_ptr += kv_head * stride_kv_head
        tables_ptr += sequence.to(tl.int64) * stride_table
        tree_start = tl.load(tree_starts_ptr + sequence)
        queries = tl.minimum((end_row - first_row) * GROUP - first_query, QUERIES)
        if queries <= FEW_QUERIES:
            _attend_queries(
                q_ptr, kv_ptr, results_ptr, sums_ptr, prefixes_ptr, ancestors_ptr, tables_ptr, scale, first_row,
                end_row, first_query, kv_head * GROUP, tree_start, stride_q_row, stride_q_head, stride_block,
                stride_token, stride_value, stride_ancestors, splits, words, GROUP, HEADS, BLOCK_TOKENS, WHOLE,
                LATENT, VALUE_DIM, VALUES, ROTATED_DIM, ROTATED, FEW_QUERIES, KEYS,
            )  # fmt: skip
        elif QUERIES > FEW_QUERIES:
            _attend_queries(
                q_ptr, kv_ptr, results_ptr, sums_ptr, prefixes_ptr, ancestors_ptr, tables_ptr, scale, first_row,
                end_row, first_query, kv_head * GROUP, tree_start, stride_q_row, stride_q_head, stride_block,
                stride_token, stride_value, stride_ancestors, splits, words, GROUP, HEADS, BLOCK_TOKENS, WHOLE,
                LATENT, VALUE_DIM, VALUES, ROTATED_DIM, ROTATED, QUERIES, KEYS,
            )  # fmt: skip


@triton.jit
def _attend_queries(
    q_ptr, kv_ptr, results_ptr, sums_ptr, prefixes_ptr, ancestors_ptr, tables_ptr, scale, first_row,
    end_row, first_query, first_head, tree_start, stride_q_row, stride_q_head, stride_block,
    stride_token, stride_value, stride_ancestors, splits, words, GROUP: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, WHOLE: tl.constexpr, LATENT: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr, ROTATED_DIM: tl.constexpr, ROTATED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One split of the keys for the tile's queries from first_query on."""
    split = tl.program_id(1)
    query = first_query + tl.arange(0, QUERIES)
    row = first_row + query // GROUP
    real = row < end_row
    row = row.to(tl.int64)
    head = first_head + query % GROUP
    prefix = tl.load(prefixes_ptr + row, real, 0)
    longest = tl.max(prefix, axis=0)
    for word in range(words):
        bits = tl.load(ancestors_ptr + row * stride_ancestors + word, real, 0)
        used = tl.max((bits != 0).to(tl.int32), axis=0)
        longest = tl.maximum(longest, used * (tree_start + 32 * (word + 1)))
    shortest = tl.min(tl.where(real, prefix, longest), axis=0)

    column = tl.arange(0, VALUES)
    q_ptrs = q_ptr + row[:, None] * stride_q_row + head[:, None] * stride_q_head
    q = _load(q_ptrs, real, VALUE_DIM, VALUES)
    q_rotated = None
    if LATENT:
        q_rotated = _load(q_ptrs + VALUE_DIM, real, ROTATED_DIM, ROTATED)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUES], tl.float32)

    length = tl.cdiv(tl.cdiv(longest, KEYS), splits) * KEYS
    begin = split * length
    end = tl.minimum(begin + length, longest)
    all_visible = tl.minimum(end, shortest // KEYS * KEYS)
    for start in range(begin, all_visible, KEYS):
        position = start + tl.arange(0, KEYS)
        top, total, acc = _take(
            q, q_rotated, kv_ptr, tables_ptr, position, None, scale, top, total, acc, stride_block, stride_token,
            stride_value, BLOCK_TOKENS, VALUE_DIM, VALUES, ROTATED_DIM, ROTATED,
        )  # fmt: skip
    for start in tl.range(tl.maximum(begin, all_visible), end, KEYS, num_stages=1):
        position = start + tl.arange(0, KEYS)
        visible = position[None, :] < prefix[:, None]
        for word in range(words):
            bits = tl.load(ancestors_ptr + row * stride_ancestors + word, real, 0)
            bit = position - tree_start - word * 32
            in_word = (bit >= 0) & (bit < 32)
            visible |= in_word[None, :] & ((bits[:, None] >> (bit & 31)[None, :]) & 1 != 0)
        top, total, acc = _take(
            q, q_rotated, kv_ptr, tables_ptr, position, visible, scale, top, total, acc, stride_block, stride_token,
            stride_value, BLOCK_TOKENS, VALUE_DIM, VALUES, ROTATED_DIM, ROTATED,
        )  # fmt: skip

    at = (row * HEADS + head) * splits + split
    stored = real
    divisor = tl.where(total > 0, total, 1.0)
    if not WHOLE:
        tl.store(sums_ptr + at, tl.where(total > 0, top + tl.log2(divisor), -float("inf")), real)
        stored = real & (total > 0)
    acc /= divisor[:, None]
    tl.store(
        results_ptr + at[:, None] * VALUE_DIM + column[None, :],
        acc.to(results_ptr.dtype.element_ty),
        stored[:, None] & (column < VALUE_DIM)[None, :],
    )


@triton.jit
def _take(
    q, q_rotated, kv_ptr, tables_ptr, position, visible, scale, top, total, acc, stride_block, stride_token,
    stride_value, BLOCK_TOKENS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    ROTATED_DIM: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys at these positions too. visible [queries, keys]; None: every query sees them all.

    What no query sees is not read. A query that has seen nothing yet has a top of -inf.
    """
    seen = None
    if visible is None:
        block = tl.load(tables_ptr + position // BLOCK_TOKENS).to(tl.int64)
    else:
        seen = tl.max(visible.to(tl.int32), axis=0) > 0
        block = tl.load(tables_ptr + position // BLOCK_TOKENS, seen, 0).to(tl.int64)
    at = kv_ptr + (block * stride_block + position % BLOCK_TOKENS * stride_token)[:, None]
    keys = _load(at, seen, VALUE_DIM, VALUES)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if q_rotated is None:
        values = _load(at + stride_value, seen, VALUE_DIM, VALUES)
    else:
        values = keys
        rotated = _load(at + VALUE_DIM, seen, ROTATED_DIM, ROTATED)
        scores = tl.dot(q_rotated, tl.trans(rotated), scores, input_precision="ieee")
    scores *= scale
    if visible is not None:
        scores = tl.where(visible, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _load(row_ptrs, wanted, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED], zeros behind DIM and in rows that are not wanted; None: all are. row_ptrs [rows, 1]."""
    column = tl.arange(0, PADDED)
    ptrs = row_ptrs + column[None, :]
    if wanted is not None:
        values = tl.load(ptrs, wanted[:, None] & (column < DIM)[None, :], 0.0)
    elif DIM == PADDED:
        values = tl.load(ptrs)
    else:
        values = tl.load(ptrs, (column < DIM)[None, :], 0.0)
    return values


@triton.jit(do_not_specialize=["first_rows_ptr", "sequences", "splits"])
def merge(
    results_ptr,
    sums_ptr,
    out_ptr,
    first_rows_ptr,
    sequences,
    splits,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The splits' results weighted by their sums; zeros for padding rows, whose splits nobody wrote."""
    row = tl.program_id(1).to(tl.int64)
    at = row * HEADS + tl.program_id(0)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    merged = tl.zeros([COLUMNS], tl.float32)
    if row < tl.load(first_rows_ptr + sequences):
        split = tl.arange(0, SPLITS)
        sums = tl.load(sums_ptr + at * splits + split, split < splits, -float("inf"))
        top = tl.max(sums, axis=0)
        base = tl.where(top == -float("inf"), 0.0, top)
        total = tl.sum(tl.exp2(sums - base), axis=0)
        for first in range(0, splits, 16):
            some = first + tl.arange(0, 16)
            weight = tl.exp2(tl.load(sums_ptr + at * splits + some, some < splits, -float("inf")) - base)
            wanted = (weight > 0)[:, None] & (column < VALUE_DIM)[None, :]
            values = tl.load(results_ptr + (at * splits + some)[:, None] * VALUE_DIM + column[None, :], wanted, 0.0)
            merged += tl.sum(values * weight[:, None], axis=0)
        merged /= tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + at * VALUE_DIM + column, merged.to(out_ptr.dtype.element_ty), column < VALUE_DIM)
