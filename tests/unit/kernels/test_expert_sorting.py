"""Sorting slots into blocks of one expert, as reference and as kernel, against plain lists."""

from collections.abc import Callable

import pytest
import torch

from tandem.kernels.expert_sorting import max_blocks, sort_by_expert
from tandem.kernels.triton.expert_sorting import launch_sort_by_expert

Sort = Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]]


def _kernel_in_small_chunks(places: torch.Tensor, experts: int, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_sort_by_expert(places, experts, block_rows, chunk=16)


_IMPLEMENTATIONS = pytest.mark.parametrize(
    "sort", [sort_by_expert, _kernel_in_small_chunks], ids=["reference", "kernel"]
)


def _expected(places: torch.Tensor, experts: int, block_rows: int) -> tuple[list[int], list[int]]:
    flat = places.flatten().tolist()
    slots: list[int] = []
    of_block: list[int] = []
    for expert in range(experts):
        mine = [slot for slot, place in enumerate(flat) if place == expert]
        while mine:
            block, mine = mine[:block_rows], mine[block_rows:]
            slots += block + [len(flat)] * (block_rows - len(block))
            of_block.append(expert)
    spare = max_blocks(len(flat), experts, block_rows) - len(of_block)
    assert spare >= 0
    return slots + [len(flat)] * spare * block_rows, of_block + [-1] * spare


@_IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("rows", "k", "experts", "block_rows"),
    [(1, 1, 1, 16), (1, 8, 48, 16), (5, 3, 4, 16), (37, 4, 6, 16), (33, 2, 3, 8)],
)
@pytest.mark.parametrize("routing", ["any", "one expert", "none held", "some without slots"])
def test_slots_are_listed_by_expert(sort: Sort, rows: int, k: int, experts: int, block_rows: int, routing: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    places = torch.randint(experts + 1, (rows, k), generator=generator)
    if routing == "one expert":
        places[:] = experts - 1
    elif routing == "none held":
        places[:] = experts
    elif routing == "some without slots":
        places = places // 2 * 2
    slots, of_block = sort(places, experts, block_rows)
    assert slots.dtype == of_block.dtype == torch.int32
    assert (slots.tolist(), of_block.tolist()) == _expected(places, experts, block_rows)


def test_the_bound_of_blocks_is_reached_and_never_passed() -> None:
    """Over all ways of giving up to 7 slots to 3 experts."""

    def spread(slots: int, experts: int) -> list[list[int]]:
        if experts == 1:
            return [[slots]]
        return [[n, *rest] for n in range(slots + 1) for rest in spread(slots - n, experts - 1)]

    for slots in range(1, 8):
        for block_rows in (1, 2, 3):
            needed = [sum(-(-n // block_rows) for n in counts) for counts in spread(slots, 3)]
            assert max(needed) == max_blocks(slots, 3, block_rows)
