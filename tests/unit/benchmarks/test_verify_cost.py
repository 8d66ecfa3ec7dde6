"""The verify cost benchmark: it measures the steps it says it measures."""

import random
from pathlib import Path

import torch

from benchmarks.verify_cost import Cell, Cost, blocks_of, lines, measure, segments_of
from tests.fakes.tiny_models import random_target
from tests.unit.verifier.steps import BLOCK_TOKENS, make_runner


def test_a_cells_step_has_its_rows_behind_its_context_in_blocks_of_its_own() -> None:
    """Sequences that shared blocks, or the padding's, would be read from a smaller memory than real ones."""
    cell = Cell(rows_per_sequence=5, sequences=3, context=30)
    segments = segments_of(cell, BLOCK_TOKENS, 64, random.Random(0))
    assert [s.rows for s in segments] == [5, 5, 5]
    assert all(s.samples and s.start == 30 for s in segments)
    blocks = [block for s in segments for block in s.blocks]
    assert len(set(blocks)) == len(blocks) == 3 * blocks_of(cell, BLOCK_TOKENS)
    assert 0 not in blocks


def test_every_cell_is_measured_in_every_repeat(tmp_path: Path) -> None:
    """On a real model runner: its result is what is timed."""
    random_target(tmp_path)
    torch.set_num_threads(1)
    runner, model = make_runner(tmp_path)
    cells = [Cell(rows, sequences, 20) for sequences in (1, 2) for rows in (1, 4)]
    costs = measure(runner, cells, BLOCK_TOKENS, model.config.vocab_size, repeats=2)
    assert [(c.rows_per_sequence, c.sequences) for c in costs] == [(1, 1), (4, 1), (1, 2), (4, 2)]
    for cost in costs:
        assert len(cost.step_ms_of_repeats) == 2
        assert 0 < cost.forward_ms <= cost.step_ms


def test_the_table_puts_each_step_beside_the_plain_one_of_as_many_sequences() -> None:
    costs = [Cost(rows, 2, 64, ms, ms, [ms]) for rows, ms in ((1, 10.0), (8, 25.0))]
    assert lines(costs)[-1].split() == ["2", "10.0", "(", "1.0)", "25.0", "(", "2.5)"]
