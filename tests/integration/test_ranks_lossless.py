"""The losslessness matrix over 8 real ranks: whatever the mode and the batch, the ids of plain decoding alone."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.v1 import generation_pb2
from tests.fakes.random_targets import random_architecture
from tests.fakes.rank_processes import VOCAB, Verifier, running, tokens_of

pytestmark = pytest.mark.slow

MODES = {
    "off": generation_pb2.SPECULATION_MODE_OFF,
    "block": generation_pb2.SPECULATION_MODE_BLOCK,
    "tree": generation_pb2.SPECULATION_MODE_TREE,
    "auto": generation_pb2.SPECULATION_MODE_AUTO,
}
COUNT = 20


@dataclass(frozen=True)
class Case:
    """One generation, with a prompt of its own."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int


def cases() -> list[Case]:
    rng = random.Random(5)
    lengths = (3, 15, 16, 40)
    return [
        Case(tuple(rng.choices(range(3, VOCAB), k=length)), temperature, seed)
        for seed, length in enumerate(lengths)
        for temperature in (0.0, 0.8)
    ]


async def emitted(verifier: Verifier, mode: str, batch: int) -> dict[Case, list[int]]:
    """The ids of all cases, so many at a time."""
    slots = asyncio.Semaphore(batch)

    async def one(case: Case) -> list[int]:
        sampling = generation_pb2.SamplingParams(temperature=case.temperature, seed=case.seed)
        async with slots:
            return await tokens_of(verifier.generate(COUNT, MODES[mode], case.prompt, sampling))

    matrix = cases()
    return dict(zip(matrix, await asyncio.gather(*map(one, matrix)), strict=True))


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("deepseek-v3", {"ep": 8, "tp": 8}),
        ("qwen3-moe", {"ep": 8, "tp": 1}),
    ],
)
async def test_every_mode_emits_what_plain_decoding_does(
    tmp_path: Path, kind: str, parallel: dict[str, object]
) -> None:
    """fp32; temperature 0 and 0.8, one sequence at a time and all in one batch. Drafts are partly right, so that steps
    accept, reject and move rows."""
    random_architecture(tmp_path / "target", kind, eos_token_id=None)
    async with running(tmp_path, tmp_path / "target", **parallel) as verifier:
        plain = await emitted(verifier, "off", 1)
        assert len({tuple(ids) for ids in plain.values()}) == len(plain)
        assert await emitted(verifier, "off", 8) == plain
        async with verifier.drafted(*([*case.prompt, *ids] for case, ids in plain.items())):
            for mode in ("block", "tree", "auto"):
                for batch in (1, 8):
                    before = await verifier.load()
                    assert await emitted(verifier, mode, batch) == plain, f"{mode}, {batch} at a time"
                    after = await verifier.load()
                    accepted = after.accepted_tokens - before.accepted_tokens
                    drafted = after.drafted_tokens - before.drafted_tokens
                    assert 0 < accepted < drafted or mode == "auto", (
                        f"{mode}, {batch} at a time: {accepted} of {drafted}"
                    )
        assert (await verifier.load()).emitted_tokens == 8 * len(plain) * COUNT
