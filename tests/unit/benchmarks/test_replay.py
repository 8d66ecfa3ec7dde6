"""`python -m benchmarks.replay`: its table, and the drafter's options."""

from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.replay import record, replay_part, table
from tandem.cli.parts import Part
from tandem.prompts import mixed_prompts
from tandem.v1 import generation_pb2 as pb
from tests.fakes.fake_verifier import FakeVerifier
from tests.fakes.gateway_stack import gateway_stack


def row(wished: float, mode: str, concurrency: int, ratio: float, differing: int = 0) -> dict[str, Any]:
    return {
        "wished_acceptance_length": wished,
        "mode": mode,
        "concurrency": concurrency,
        "ratio_to_off": ratio,
        "acceptance_length": wished - 0.25,
        "differing_requests": differing,
    }


def test_the_table_has_a_row_per_acceptance_length_and_a_column_per_load() -> None:
    """Mode off is the unit, and outputs that differ are not passed over."""
    rows = [row(2.0, "off", 1, 1.0), row(2.0, "auto", 1, 1.5), row(2.0, "auto", 4, 1.1), row(3.0, "auto", 1, 2.0, 1)]
    console = Console(width=120, record=True)
    console.print(table(rows))
    text = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["2", "auto", "1.50", "(1.75)", "1.10", "(1.75)"] in text
    assert ["3", "auto", "2.00", "(2.75)", "1", "differ!", "-"] in text
    assert not any("off" in line[1:2] for line in text)


def test_the_replay_drafter_takes_the_drafters_place() -> None:
    """Same address and health service; its end is the measurement's end, unlike a drafter's."""
    original = Part("drafter", ("x",), "127.0.0.1:1", ("tandem.Drafter",), 15, essential=False)
    part = replay_part(original, Path("a.yaml"), Path("r.json"), 7, 3.8)
    assert (part.address, part.health_services, part.essential) == (original.address, original.health_services, True)
    assert part.command[-8:] == (
        "--config",
        "a.yaml",
        "--recording",
        "r.json",
        "--nodes",
        "7",
        "--acceptance-length",
        "3.8",
    )


async def test_answers_are_recorded_greedily_and_without_drafts_under_the_ids_of_the_prompt() -> None:
    """What the drafter compares its contexts with must be what the verifier was sent."""
    async with gateway_stack(FakeVerifier(max_context=4096)) as stack:
        recorded = await record(stack.client, mixed_prompts(3), max_tokens=6)
        sent = {tuple(r.token_ids): r for r in stack.verifier.requests}
        assert len(recorded) == 3
        for item in recorded:
            request = sent[tuple(item.prompt)]
            assert request.speculation_mode == pb.SPECULATION_MODE_OFF
            assert request.sampling.temperature == 0
            assert item.answer == list(stack.verifier.script(request))[:6]
