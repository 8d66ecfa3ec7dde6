"""The walk of all sequences of a step along the target's choices, in one call of fixed shape."""

from typing import NamedTuple

import torch


class Accepted(NamedTuple):
    """Where the walks came to."""

    rows: torch.Tensor
    """[sequences, 1 + max_nodes] int32: the root's row, the accepted nodes' rows in order of depth, then -1."""
    counts: torch.Tensor
    """[sequences] int32: accepted rows, the root's included, which is how many tokens are emitted; 0 without a root.
    Token i is chosen[rows[s, i]], so the bonus is chosen[rows[s, counts[s] - 1]]."""


def walk_rows(
    chosen: torch.Tensor, token_ids: torch.Tensor, parents: torch.Tensor, roots: torch.Tensor, max_nodes: int
) -> Accepted:
    """tandem.draft_tree.walk for many sequences: from each root on to the child that carries the target's token, of
    children with the same token to the first, until there is none.

    chosen [rows] int64: the target's token after each row. token_ids [rows] int64. parents [rows] int32: the row of
    the step above each draft node, -1 for every row that is none. roots [sequences] int32: -1 where there is none.
    A sequence's nodes lie among the max_nodes rows behind its root, in any order. Nothing waits for the device.
    """
    if chosen.is_cuda:
        from tandem.kernels.triton.walk import launch_walk

        return Accepted(*launch_walk(chosen, token_ids, parents, roots, max_nodes))
    return Accepted(*_reference(chosen, token_ids, parents, roots, max_nodes))


def _reference(
    chosen: torch.Tensor, token_ids: torch.Tensor, parents: torch.Tensor, roots: torch.Tensor, max_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(chosen)
    above = parents.long().clamp(min=0)
    follows = (parents >= 0) & (token_ids == chosen.index_select(0, above))
    # Of each row the child the walk goes on to; `rows` stands for none and leads to itself.
    child = torch.full((rows + 1,), rows, device=chosen.device)
    row = torch.arange(rows, device=chosen.device)
    child.scatter_reduce_(0, above, torch.where(follows, row, rows), "amin")
    row = torch.where(roots >= 0, roots, rows).long()
    path = [row]
    for _ in range(max_nodes):
        row = child.index_select(0, row)
        path.append(row)
    paths = torch.stack(path, dim=1)
    walked = paths < rows
    return torch.where(walked, paths, -1).int(), walked.sum(dim=1, dtype=torch.int32)
