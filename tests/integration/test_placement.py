"""Experts placed by a file, over real processes, and the file that comes out at the end."""

import signal
from pathlib import Path

import pytest
import torch

from tandem.expert_files import ExpertPlacement, read_loads, write_placement
from tandem.v1 import generation_pb2
from tests.fakes.random_targets import random_architecture
from tests.fakes.rank_processes import PROMPT, running, tokens_of

pytestmark = pytest.mark.slow

COUNT = 10


async def test_placed_experts_emit_what_the_target_alone_would_and_their_loads_are_written(tmp_path: Path) -> None:
    """Greedy, by transformers. Every row, of the prompt or of a decode step, went to two experts of each layer."""
    target = tmp_path / "target"
    oracle = random_architecture(target, "mixtral", eos_token_id=None)
    truth = list(PROMPT)
    with torch.inference_mode():
        while len(truth) < len(PROMPT) + COUNT:
            truth.append(int(oracle(torch.tensor([truth])).logits[0, -1].argmax()))
    odd, even = [7, 5, 3, 1], [0, 2, 4, 6]
    placement = ExpertPlacement(model="target", ranks=2, layers={0: [odd, even], 1: [even, odd]})
    write_placement(tmp_path / "placement.json", placement)
    parallel = {"ep": 2, "placement": "placement.json", "expert_loads": "loads.json"}
    async with running(tmp_path, target, **parallel) as verifier:
        call = verifier.generate(max_tokens=COUNT, mode=generation_pb2.SPECULATION_MODE_OFF)
        assert PROMPT + await tokens_of(call) == truth
        verifier.process.send_signal(signal.SIGTERM)
        assert await verifier.ended(10) == 0
    rows = len(PROMPT) + COUNT - 1
    written = read_loads(tmp_path / "loads.json")
    assert {layer: sum(tokens) for layer, tokens in written.layers.items()} == {0: 2 * rows, 1: 2 * rows}
