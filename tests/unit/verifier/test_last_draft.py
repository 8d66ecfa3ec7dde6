"""The draft that was verified last: what it was, what was taken of it, and that it is kept only where it may be."""

import pytest

from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from tandem.speculation import SpeculationMode
from tests.fakes.fake_target import VOCAB, Bench, FakeDrafter
from verifier_service.last_draft import VerifiedDraft
from verifier_service.sequence import Sequence, SequenceRequest
from verifier_service.step import Segment, Verdict

PROMPT = [3, 1, 4]


def half_right(right: list[int]) -> list[int]:
    return [t if i < len(right) // 2 else (t + 1) % VOCAB for i, t in enumerate(right)]


@pytest.mark.parametrize("mode", [SpeculationMode.BLOCK, SpeculationMode.TREE], ids=lambda mode: mode.value)
def test_it_is_what_the_target_took(mode: SpeculationMode) -> None:
    """Anchor, accepted nodes and bonus are a path of the draft, and stand in the text one behind the other."""
    bench = Bench(keep_last_draft=True)
    drafter = FakeDrafter(bench.engine, edit=half_right)
    answer = bench.submit(PROMPT, 40, speculation_mode=mode).wait()
    load = bench.engine.load()
    last = load.last_draft
    drafter.leave()
    bench.close()
    assert last
    assert last.number == load.totals.drafts > 1
    assert [last.draft.parents[index - 1] for index in last.accepted] == [0, *last.accepted][: len(last.accepted)]
    path = [last.anchor, *(last.draft.tokens[index - 1] for index in last.accepted), last.bonus]
    text = [*PROMPT, *answer.tokens]
    assert any(text[i : i + len(path)] == path for i in range(len(text)))


def test_off_nothing_of_a_request_is_kept() -> None:
    bench = Bench()
    drafter = FakeDrafter(bench.engine)
    bench.submit(PROMPT, 20).wait()
    load = bench.engine.load()
    drafter.leave()
    bench.close()
    assert load.totals.drafts > 0
    assert load.last_draft is None


def test_totals_per_position_are_the_metrics() -> None:
    bench = Bench()
    drafter = FakeDrafter(bench.engine, edit=half_right)
    bench.submit(PROMPT, 40).wait()
    totals = bench.engine.load().totals
    metric = "tandem_spec_decode_num_accepted_tokens_per_pos_total"
    assert sum(totals.accepted_per_position) == totals.accepted > 0
    per_position = [bench.metric(metric, position=str(k)) for k in range(len(totals.accepted_per_position))]
    assert totals.accepted_per_position == per_position
    drafter.leave()
    bench.close()


@pytest.mark.parametrize("known", [1, 3])
def test_rows_become_nodes(known: int) -> None:
    """Rows count the known tokens too, nodes do not."""
    sequence = Sequence.from_request(1, SequenceRequest("r", [7, 8, 9], 3, SamplingParams(temperature=0.0), 9))
    draft = Draft([5, 6, 7], [0, 0, 2], [0.0] * 3)
    segment = Segment(sequence, 0, [7, 8, 9][-known:], draft, True, [1])
    verdict = Verdict([*range(known), known + 1, known + 2], [6, 7, 40], [])
    last = VerifiedDraft.of(4, segment, verdict, 0.0)
    assert (last.anchor, last.accepted, last.bonus) == (9, [2, 3], 40)
