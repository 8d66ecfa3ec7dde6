"""One program per sequence: its nodes stay in registers, each step down the tree is one reduction over them."""

import torch
import triton
import triton.language as tl


def launch_walk(
    chosen: torch.Tensor, token_ids: torch.Tensor, parents: torch.Tensor, roots: torch.Tensor, max_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See tandem.kernels.walk: (rows, counts)."""
    sequences = len(roots)
    rows = torch.empty((sequences, 1 + max_nodes), dtype=torch.int32, device=chosen.device)
    counts = torch.empty(sequences, dtype=torch.int32, device=chosen.device)
    _walk[(sequences,)](
        chosen,
        token_ids,
        parents,
        roots,
        rows,
        counts,
        len(chosen),
        MAX_NODES=max_nodes,
        BLOCK=triton.next_power_of_2(max_nodes + 1),
        num_warps=1,
    )
    return rows, counts


@triton.jit
def _walk(
    chosen_ptr,
    tokens_ptr,
    parents_ptr,
    roots_ptr,
    rows_ptr,
    counts_ptr,
    row_count,
    MAX_NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    root = tl.load(roots_ptr + sequence)
    # As in the reference row_count stands for no row: nothing has it for its parent.
    current = tl.where(root >= 0, root, row_count)
    row = current + place
    mask = (place > 0) & (place <= MAX_NODES) & (row < row_count)
    parents = tl.load(parents_ptr + row, mask=mask, other=-1)
    tokens = tl.load(tokens_ptr + row, mask=mask, other=-1)

    path = tl.where(place == 0, current, row_count)
    for depth in range(1, MAX_NODES + 1):
        token = tl.load(chosen_ptr + tl.minimum(current, row_count - 1))
        follows = (parents == current) & (tokens == token)
        current = tl.min(tl.where(follows, row, row_count), axis=0)
        path = tl.where(place == depth, current, path)
    walked = path < row_count
    tl.store(rows_ptr + sequence * (MAX_NODES + 1) + place, tl.where(walked, path, -1), mask=place <= MAX_NODES)
    tl.store(counts_ptr + sequence, tl.sum(walked.to(tl.int32), axis=0))
