"""Where a tree's keys lie: every row meets its own path in plain decoding's order, lanes and tiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.tree_layout import lay_out


@st.composite
def parent_lists(draw: st.DrawFn, most: int = 40) -> list[int]:
    return [-1, *(draw(st.integers(max(0, i - 8), i)) for i in range(draw(st.integers(0, most))))]


def path(parents: list[int], row: int) -> list[int]:
    found = [row]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found[::-1]


@given(parent_lists(), st.integers(0, 600), st.sampled_from([(16, 256), (4, 32), (1, 16)]))
def test_a_row_meets_its_path_as_plain_decoding_does(parents: list[int], start: int, shape: tuple[int, int]) -> None:
    """Order, lane and tile of plain decoding, for the path of every row; each row asks once; no column holds two."""
    stride, tile = shape
    views = lay_out(parents, start, stride, tile)
    assert sorted(row for view in views for row in view.rows) == list(range(len(parents)))
    for view in views:
        assert len(set(view.columns.values())) == len(view.columns)
        for row in view.rows:
            columns = [view.columns[i] for i in path(parents, row)]
            assert columns == sorted(columns)
            assert [c % stride for c in columns] == [(start + d) % stride for d in range(len(columns))]
            assert [c // tile for c in columns] == [(start + d) // tile for d in range(len(columns))]


@given(parent_lists(), st.integers(0, 600))
def test_without_lanes_and_tiles_rows_lie_in_slot_order(parents: list[int], start: int) -> None:
    """Then nothing is moved: one view, row i at start + i."""
    (view,) = lay_out(parents, start, 1, 1 << 30)
    assert view.columns == {row: start + row for row in range(len(parents))}


@pytest.mark.parametrize(("start", "views"), [(0, 1), (250, 4)])
def test_a_star_splits_only_where_its_tile_ends(start: int, views: int) -> None:
    """Four siblings 16 columns apart fit behind 0, and not between 250 and 256."""
    assert len(lay_out([-1, 0, 0, 0, 0], start, 16, 256)) == views


def test_a_chain_lies_as_in_plain_decoding() -> None:
    (view,) = lay_out(list(range(-1, 39)), 250, 16, 256)
    assert view.columns == {row: 250 + row for row in range(40)}
