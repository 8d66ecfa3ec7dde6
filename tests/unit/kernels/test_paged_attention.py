"""Paged attention, the torch reference and the kernel in Triton's interpreter, against a dense mask in float64."""

import random
from functools import partial

import pytest
import torch

from tandem.kernels.paged_attention import paged_attention, rows_per_tile
from tandem.kernels.triton.paged_attention import launch_paged_attention
from tests.unit.kernels.attention_case import Case, Rows, line, make_case, star, tree

PARAMETERS = {"queries": 16, "keys": 16, "num_warps": 4, "num_stages": 2, "splits": 1}
BORDERS = [Rows(0, 1), Rows(14, 1), Rows(15, 1), Rows(16, 1), Rows(17, 1), Rows(47, 1)]
LATENT = {"key_dim": 24, "value_dim": 16}


def _kernel(case: Case, **parameters: int) -> torch.Tensor:
    return launch_paged_attention(
        case.q, case.kv, case.tables, case.scale, case.value_dim, {**PARAMETERS, **parameters}
    )


def _reference(case: Case) -> torch.Tensor:
    return paged_attention(case.q, case.kv, case.tables, case.scale, case.value_dim)


def _check(case: Case, **parameters: int) -> None:
    expected = case.expected()
    for result in (_reference(case), _kernel(case, **parameters)):
        assert result.dtype == case.q.dtype
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("latent", [{}, LATENT], ids=["pair", "latent"])
def test_prefixes_around_the_borders_of_pages_and_splits(splits: int, latent: dict[str, int]) -> None:
    _check(make_case(BORDERS, heads=2, padding_sequences=1, padding_rows=1, **latent), splits=splits)


@pytest.mark.parametrize(("block_tokens", "keys"), [(16, 64), (32, 16), (64, 32)])
def test_pages_smaller_and_larger_than_a_block_of_keys(block_tokens: int, keys: int) -> None:
    sequences = [Rows(block_tokens + 1, 2), tree(2 * block_tokens - 1, 5), Rows(0, 3)]
    _check(make_case(sequences, heads=2, block_tokens=block_tokens), keys=keys, splits=2)


@pytest.mark.parametrize(
    "sequences",
    [
        [tree(17, 64, seed=1), line(0, 2)],
        [star(15, 33), line(16, 32), tree(5, 1)],
        [line(31, 64), star(32, 2)],
        [tree(0, 31, seed=2), star(64, 64)],
    ],
    ids=lambda sequences: "+".join(str(s.rows) for s in sequences),
)
def test_trees_of_1_to_64_nodes(sequences: list[Rows]) -> None:
    """Random, star and line, their bits in one word, at its end and in two."""
    _check(make_case(sequences, heads=1, rows_per_tile=16), splits=2)


def test_plain_tokens_chunks_and_trees_share_a_step() -> None:
    """Groups of three heads: a tile's queries are no power of two. Tiles end inside sequences and at their ends."""
    sequences = [Rows(0, 9), Rows(33, 1), tree(20, 7), Rows(30, 0), Rows(16, 8), star(3, 4)]
    case = make_case(sequences, heads=6, kv_heads=2, padding_rows=3, padding_sequences=2, more_blocks=2)
    _check(case, splits=1, keys=32)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_step_without_sequences_gives_zeros(splits: int) -> None:
    _check(make_case([], heads=3, padding_rows=5, padding_sequences=2), splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_padding_rows_get_zeros_whatever_lay_there(splits: int) -> None:
    """More padding rows than a tile has, and results that memory of an earlier call is used for."""
    case = make_case([Rows(3, 1)], heads=2, padding_rows=12, rows_per_tile=4)
    torch.empty(13 * 2 * 16 * splits).fill_(torch.nan)
    result = _kernel(case, splits=splits)
    assert torch.count_nonzero(result[1:]) == 0
    assert torch.count_nonzero(result[0])


def test_a_row_that_sees_nothing_gets_zeros() -> None:
    case = make_case([Rows(0, 1), Rows(5, 1)], heads=2)
    case.tables.prefixes[0] = 0
    for result in (_reference(case), _kernel(case), _kernel(case, splits=2)):
        assert torch.count_nonzero(result[0]) == 0
        torch.testing.assert_close(result[1].double(), case.expected()[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "shape"),
    [
        (40, {"key_dim": 40, "value_dim": 32}),
        (8, {"key_dim": 72, "value_dim": 48}),
        (5, {"key_dim": 24}),
    ],
    ids=["40 heads, groups of them", "latent of no power of two", "head of no power of two"],
)
def test_head_shapes(heads: int, shape: dict[str, int]) -> None:
    _check(make_case([tree(18, 3), Rows(2, 1)], heads=heads, rows_per_tile=2, **shape), splits=2)


def test_a_tile_of_few_queries_beside_a_full_one() -> None:
    """Decoding in a bucket for trees: the small matrix product and the large one in the same launch."""
    sequences = [Rows(40, 1), tree(21, 16), Rows(7, 4)]
    _check(make_case(sequences, heads=8, kv_heads=2, rows_per_tile=16), queries=64, splits=2)


def test_half_precision_is_summed_in_single() -> None:
    case = make_case([Rows(600, 1), tree(30, 4)], heads=2, dtype=torch.float16, block_tokens=64)
    expected = case.expected()
    for result in (_reference(case), _kernel(case, keys=128, splits=2)):
        torch.testing.assert_close(result.double(), expected, rtol=2e-3, atol=2e-3)


def test_reference_on_random_steps() -> None:
    chance = random.Random(0)
    shapes = [partial(tree, seed=3), star, line, Rows]
    for seed in range(40):
        sequences = [
            chance.choice(shapes)(chance.choice([0, 1, 15, 16, 17, 40]), chance.choice([1, 2, 7, 33]))
            for _ in range(chance.randrange(1, 5))
        ]
        latent = {"key_dim": 40, "value_dim": 32} if chance.random() < 0.5 else {}
        padding = {"padding_rows": chance.randrange(9), "padding_sequences": chance.randrange(3)}
        case = make_case(sequences, heads=4, rows_per_tile=chance.choice([1, 4, 32]), seed=seed, **padding, **latent)
        torch.testing.assert_close(_reference(case).double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_what_shares_its_step() -> None:
    """Alone, and between others with padding: equal bits in the reference, where the tables' room for blocks is the
    same; equal bits in the kernel too, with as many splits."""
    mine = tree(21, 6)
    alone = make_case([mine], heads=4, kv_heads=2, more_blocks=3)
    others = [mine, Rows(70, 1), star(2, 9)]
    shared = make_case(others, heads=4, kv_heads=2, padding_rows=5, padding_sequences=2)
    assert alone.tables.block_tables.shape[1] == shared.tables.block_tables.shape[1]
    assert torch.equal(_reference(alone), _reference(shared)[:6])
    assert torch.equal(_kernel(alone, splits=2), _kernel(shared, splits=2)[:6])


def test_a_tile_holds_as_many_rows_as_fill_the_matrix_product() -> None:
    assert [rows_per_tile(heads) for heads in (1, 3, 4, 8, 16, 64, 128)] == [128, 42, 32, 16, 8, 2, 1]
