"""What a verify step of the target costs, by rows per sequence, number of sequences and context: the verifier's own
model runner, driven in this process. Drafts are random chains; rows 1 is a plain decode step.

    python -m benchmarks.verify_cost --config configs/demo.yaml --json verify-cost.json

All cells are measured once per repeat, in an order drawn anew each time, so that a machine that changes its speed hits
them alike; figures are medians of the repeats. Keys and values are zeros: their content does not change the time.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.bench.machine import machine, machine_line, versions
from tandem.config import StackConfig, load_config
from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from verifier_service.sequence import Sequence as TargetSequence
from verifier_service.sequence import SequenceRequest
from verifier_service.step import Segment

if TYPE_CHECKING:
    from verifier_service.model_runner import ModelRunner

WARM_UPS = 1


@dataclass(frozen=True)
class Cell:
    """One kind of step."""

    rows_per_sequence: int
    """The anchor and the nodes of the draft."""
    sequences: int
    context: int
    """Tokens that each sequence holds before the step."""


@dataclass(frozen=True)
class Cost:
    """Medians of one cell."""

    rows_per_sequence: int
    sequences: int
    context: int
    step_ms: float
    """The whole step: forward, sampling and walk, features."""
    forward_ms: float
    step_ms_of_repeats: list[float]


def load_runner(config: StackConfig, cells: Sequence[Cell]) -> "ModelRunner":
    """As the verifier builds it, with KV for the largest cell."""
    from tandem.checkpoints.folder import CheckpointFolder
    from verifier_service.model_runner import ModelRunner
    from verifier_service.parallel.launch import ONLY
    from verifier_service.target_part import feature_projection, load_part

    section = config.verifier
    part = load_part(config, CheckpointFolder(config.target), ONLY)
    features = feature_projection(config, part)
    blocks = max(cell.sequences * blocks_of(cell, section.kv_block_tokens) for cell in cells)
    return ModelRunner(part.model, features, blocks + 1, section.kv_block_tokens, part.device)


def blocks_of(cell: Cell, block_tokens: int) -> int:
    """KV blocks of one sequence."""
    return -(-(cell.context + cell.rows_per_sequence) // block_tokens)


def segments_of(
    cell: Cell, block_tokens: int, vocab_size: int, rng: random.Random, tree: bool = False
) -> list[Segment]:
    """The rows of a step: per sequence its newest token and random ones, in a chain or a tree in which every node has
    two children. Block 0 is the padding's."""
    count = blocks_of(cell, block_tokens)
    nodes = cell.rows_per_sequence - 1
    segments = []
    for number in range(cell.sequences):
        tokens = [rng.randrange(vocab_size) for _ in range(cell.context + 1)]
        request = SequenceRequest(str(number), tokens, len(tokens), SamplingParams(temperature=0.0), nodes + 1)
        sequence = TargetSequence.from_request(number, request)
        sequence.committed = cell.context
        parents = [(i // 2 if tree else i) for i in range(nodes)]
        draft = Draft([rng.randrange(vocab_size) for _ in range(nodes)], parents, [0.0] * nodes) if nodes else None
        blocks = list(range(1 + number * count, 1 + (number + 1) * count))
        segments.append(Segment(sequence, cell.context, tokens[-1:], draft, True, blocks))
    return segments


def measure(
    runner: "ModelRunner", cells: Sequence[Cell], block_tokens: int, vocab_size: int, repeats: int
) -> list[Cost]:
    """All cells, `repeats` times each after a warm-up; fixed random tokens."""
    rng = random.Random(0)
    steps: dict[Cell, list[float]] = {cell: [] for cell in cells}
    forwards: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for repeat in range(WARM_UPS + repeats):
        for cell in rng.sample(list(cells), len(cells)):
            segments = segments_of(cell, block_tokens, vocab_size, rng)
            started = time.perf_counter()
            result = runner.run(segments)
            seconds = time.perf_counter() - started
            if repeat >= WARM_UPS:
                steps[cell].append(seconds * 1e3)
                forwards[cell].append(result.forward_seconds * 1e3)
        print(f"repeat {repeat} of {repeats}" if repeat >= WARM_UPS else "warm-up", flush=True)
    return [
        Cost(
            **asdict(cell),
            step_ms=statistics.median(steps[cell]),
            forward_ms=statistics.median(forwards[cell]),
            step_ms_of_repeats=steps[cell],
        )
        for cell in cells
    ]


def lines(costs: Sequence[Cost]) -> list[str]:
    """A table per context: a row per number of sequences, a column per rows of each, ms and by the plain step."""
    said = []
    by_cell = {(c.context, c.sequences, c.rows_per_sequence): c.step_ms for c in costs}
    contexts, sequences, rows = (sorted({key[i] for key in by_cell}) for i in range(3))
    for context in contexts:
        said.append(f"context {context}: ms per step (in steps of {rows[0]} rows per sequence)")
        said.append("sequences" + "".join(f"{count:>15}" for count in rows))
        for count in sequences:
            plain = by_cell[context, count, rows[0]]
            times = [by_cell[context, count, r] for r in rows]
            said.append(f"{count:9}" + "".join(f"{ms:8.1f} ({ms / plain:4.1f})" for ms in times))
    return said


def run(config: StackConfig, cells: Sequence[Cell], repeats: int) -> dict[str, Any]:
    """Measure and describe."""
    os.environ.setdefault(
        "GOMP_SPINCOUNT", str(config.verifier.omp_spin_count)
    )  # before torch is loaded, as services do
    runner = load_runner(config, cells)
    vocab_size = json.loads((config.target / "config.json").read_text())["vocab_size"]
    costs = measure(runner, cells, config.verifier.kv_block_tokens, vocab_size, repeats)
    return {
        "verify_cost": [asdict(cost) for cost in costs],
        "model": config.target.name,
        "dtype": config.verifier.dtype,
        "repeats": repeats,
        "machine": machine(),
        "machine_line": machine_line(),
        "versions": versions(),
    }


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--rows", type=_numbers, default=_numbers("1,2,4,8,16,32,64"), help="per sequence")
    parser.add_argument("--sequences", type=_numbers, default=_numbers("1,2,4,8,16"))
    parser.add_argument("--contexts", type=_numbers, default=_numbers("128,512"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cells = [Cell(r, s, c) for c in options.contexts for s in options.sequences for r in options.rows]
    measured = run(load_config(options.config), cells, options.repeats)
    for line in lines([Cost(**cost) for cost in measured["verify_cost"]]):
        print(line)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
