"""The compiled kernel at real head shapes, in bf16, against a dense mask in float64."""

import pytest
import torch

from tandem.kernels.paged_attention import paged_attention, rows_per_tile
from tests.unit.kernels.attention_case import Case, Rows, line, make_case, star, tree

STEPS = {
    "decode": [Rows(0, 1), Rows(15, 1), Rows(16, 1), Rows(1000, 1), Rows(4099, 1)],
    "blocks": [Rows(31, 8), Rows(700, 8), Rows(0, 5)],
    "trees": [tree(640, 64), star(17, 33), line(2050, 16), tree(3, 1)],
    "mixed": [Rows(0, 70), tree(900, 31), Rows(63, 1), Rows(128, 40)],
}
SHAPES = {
    "head 64, group 1": {"heads": 4, "kv_heads": 4, "key_dim": 64},
    "head 128, group 4": {"heads": 8, "kv_heads": 2, "key_dim": 128},
    "head 128, group 5": {"heads": 10, "kv_heads": 2, "key_dim": 128},
    "head 96, group 16": {"heads": 16, "kv_heads": 1, "key_dim": 96},
    "latent, 8 heads": {"heads": 8, "key_dim": 576, "value_dim": 512},
    "latent, 128 heads": {"heads": 128, "key_dim": 576, "value_dim": 512},
}


def _attend(case: Case) -> torch.Tensor:
    return paged_attention(case.q, case.kv, case.tables, case.scale, case.value_dim)


def _close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result.double().cpu(), expected, rtol=2e-2, atol=1e-2)


def _case(step: str, shape: str, **more: int) -> Case:
    numbers = SHAPES[shape]
    tile = rows_per_tile(numbers["heads"] // numbers.get("kv_heads", 1))
    return make_case(STEPS[step], rows_per_tile=tile, dtype=torch.bfloat16, device="cuda", **numbers, **more)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS)
def test_every_step_at_every_shape(step: str, shape: str) -> None:
    case = _case(step, shape, padding_rows=3, padding_sequences=2)
    _close(_attend(case), case.expected())


@pytest.mark.parametrize("block_tokens", [32, 64])
def test_larger_pages(block_tokens: int) -> None:
    case = _case("mixed", "head 128, group 4", block_tokens=block_tokens)
    _close(_attend(case), case.expected())


def test_a_captured_launch_follows_what_is_written_into_its_tables() -> None:
    """Other sequences, lengths and trees in the same buffers: the launch holds nothing of the step it was captured
    with, padding included."""
    case = _case("decode", "head 128, group 4", padding_rows=100, more_blocks=10)
    _attend(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _attend(case)
    other = _case("trees", "head 128, group 4", seed=7)
    rows, blocks = len(other.q), other.tables.block_tables.shape[1]
    blocks_room = case.tables.block_tables.shape[1]
    assert rows <= len(case.q)
    assert blocks <= blocks_room
    case.q[:rows] = other.q
    pool = torch.zeros(max(len(case.kv), len(other.kv)), *case.kv.shape[1:], device="cuda", dtype=case.kv.dtype)
    pool[: len(other.kv)] = other.kv
    assert len(other.kv) <= len(case.kv), "the captured pool must hold the other step"
    case.kv.copy_(pool[: len(case.kv)])
    case.tables.write(STEPS["trees"])
    graph.replay()
    _close(captured[:rows], other.expected())
    assert torch.count_nonzero(captured[rows:]) == 0


def test_a_row_does_not_depend_on_what_shares_its_step() -> None:
    mine = tree(900, 16)
    numbers = {"heads": 8, "kv_heads": 2, "key_dim": 128, "rows_per_tile": 32, "dtype": torch.bfloat16}
    alone = make_case([mine], device="cuda", **numbers)
    shared = make_case([mine, Rows(3000, 1), star(20, 9)], device="cuda", padding_rows=5, **numbers)
    _close(_attend(alone), _attend(shared)[:16].double().cpu())
