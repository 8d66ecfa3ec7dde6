"""Where the keys of a tree's nodes lie among the keys that its rows look at. Pure Python: knows no tensors.

Plain decoding sums a row over [prefix, its path] without gaps. Columns a row does not see add exact zeros, so its
result keeps its bits if the keys it does see stay in the same order, in the same lane of the vector unit (column modulo
`stride`) and in the same block of the matrix product (column divided by `tile`). lay_out() finds such columns: a node
of depth d lies at start + d, or a multiple of `stride` further where that is taken or its parent lies further.
"""

from dataclasses import dataclass, field


@dataclass
class TreeView:
    """Rows of a tree that attend together, and the column of every key they see behind the prefix."""

    rows: list[int] = field(default_factory=list)
    """Rows that ask here."""
    columns: dict[int, int] = field(default_factory=dict)
    """Row -> column of its key: of the rows that ask and of all above them."""


def lay_out(parents: list[int], start: int, stride: int, tile: int) -> list[TreeView]:
    """Views of a tree whose first row stands at column `start`; each row asks in exactly one view.

    parents: of each row the row above it, always an earlier one; -1 for the first. One view unless nodes that share a
    lane have no room before the end of their tile. With stride 1 and no tile in reach row i lies at start + i.
    """
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*paths[parent], row] if row else [row])
    views: list[TreeView] = []
    for row, path in enumerate(paths):
        for view in views:
            if _place(view, path, start, stride, tile):
                break
        else:
            view = TreeView()
            views.append(view)
            placed = _place(view, path, start, stride, tile)
            assert placed, "a lone path lies as in plain decoding"
        view.rows.append(row)
    return views


def _place(view: TreeView, path: list[int], start: int, stride: int, tile: int) -> bool:
    """Find columns for the rows of a path that have none; False, with nothing changed, if one has no room."""
    taken = set(view.columns.values())
    found: dict[int, int] = {}
    above = start - 1
    for depth, row in enumerate(path):
        column = view.columns.get(row)
        if column is None:
            column = start + depth
            column += max(0, -(-(above + 1 - column) // stride)) * stride
            while column in taken:
                column += stride
            if column // tile != (start + depth) // tile:
                return False
            found[row] = column
        above = column
    view.columns |= found
    return True
