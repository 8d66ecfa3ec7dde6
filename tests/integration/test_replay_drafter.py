"""The replay drafter as a process, against a verifier that sends what a test tells it."""

import asyncio
import json
from pathlib import Path

from benchmarks.replay import replay_part
from benchmarks.replay_drafter import Recorded, save_recording
from tandem.cli.parts import DRAFTER, Part
from tandem.cli.stack import Stack
from tandem.v1 import speculation_pb2 as pb
from tests.fakes.fake_speculation import FakeSpeculation
from tests.fakes.ports import free_port


async def test_it_registers_for_token_ids_drafts_the_recorded_answer_and_ends_on_sigterm(tmp_path: Path) -> None:
    """Started as `benchmarks.replay` starts it, in the place of the stack's drafter."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    save_recording(tmp_path / "answers.json", [Recorded([1, 2], [10, 11, 12, 13, 14])])
    listen = f"127.0.0.1:{free_port()}"
    lines: list[str] = []
    async with FakeSpeculation() as fake:
        config = tmp_path / "stack.yaml"
        config.write_text(f"target: {tmp_path}\ndrafter: {{listen: '{listen}', verifier: '{fake.address}'}}\n")
        original = Part("drafter", ("unused",), listen, (DRAFTER,), 10, essential=False)
        part = replay_part(original, config, tmp_path / "answers.json", nodes=3, acceptance_length=4.0)
        async with Stack([part], lambda name, line: lines.append(line)):
            stream = await fake.next_stream()
            registration = stream.registration
            assert (registration.draft_source, registration.vocab_size) == (pb.DRAFT_SOURCE_NGRAM, 100)
            context = pb.SequenceContext(sequence_id=1, start_position=0, count=3, token_ids=[1, 2, 10])
            request = pb.DraftRequest(
                sequence_id=1, base_position=3, anchor=11, max_nodes=16, shape=pb.DRAFT_SHAPE_TREE
            )
            await stream.send(pb.Round(contexts=[context], requests=[request]))
            (draft,) = (await stream.drafts()).drafts
            assert (list(draft.tokens), list(draft.parents), list(draft.log_probs)) == (
                [12, 13, 14],
                [0, 1, 2],
                [0, 0, 0],
            )
        async with asyncio.timeout(10):
            await stream.half_closed.wait()
