"""The replay drafter: what it proposes is the recorded answer, wrong as often as it says."""

import math
from pathlib import Path

import pytest

from benchmarks.replay_drafter import (
    Recorded,
    ReplayDrafter,
    acceptance_probability,
    load_recording,
    save_recording,
)
from tandem.draft_tree import walk
from tandem.speculation import Context, DraftRequest, Round

VOCAB = 1000
RECORDED = [
    Recorded(prompt=[1, 2, 3], answer=[i * 7 % VOCAB for i in range(6000)]),
    Recorded(prompt=[1, 2, 4], answer=list(range(500))),
]


def drafter(nodes: int = 7, probability: float = 1.0) -> ReplayDrafter:
    return ReplayDrafter(RECORDED, nodes, probability, VOCAB)


def ask(base: int, anchor: int, max_nodes: int = 7, tokens: tuple[int, ...] = (), start: int = 0) -> Round:
    context = Context(5, 0, start, len(tokens), b"", tokens)
    return Round([context] if tokens else [], [DraftRequest(5, 0, base, anchor, max_nodes)], [])


def test_a_sequence_is_known_by_its_prompt_and_followed_to_the_answers_end() -> None:
    """Prompts that begin alike must not be mixed up; behind the recorded answer there is nothing to propose."""
    replay = drafter()
    (first,) = replay.work([ask(3, 0, tokens=(1, 2, 4))]).drafts
    assert first.draft.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert (first.sequence_id, first.epoch, first.base_position) == (5, 0, 3)
    tail = tuple(range(498))
    (last,) = replay.work([ask(3 + 498, 498, tokens=tail, start=3)]).drafts
    assert last.draft.tokens == [499]
    (behind,) = replay.work([ask(3 + 499, 499, tokens=(498,), start=3 + 498)]).drafts
    assert len(behind.draft) == 0


def test_an_unknown_text_gets_an_empty_draft_and_missing_tokens_are_asked_for() -> None:
    """The verifier must not wait for a draft that never comes."""
    (answer,) = drafter().work([ask(2, 9, tokens=(8, 8))]).drafts
    assert len(answer.draft) == 0
    gapped = drafter().work([ask(3, 0)])
    assert gapped.drafts == []
    assert [(gap.sequence_id, gap.held_positions) for gap in gapped.gaps] == [(5, 0)]


def test_no_draft_is_longer_than_asked_for_or_than_a_block() -> None:
    for max_nodes, length in ((3, 3), (60, 7)):
        (answer,) = drafter().work([ask(3, 0, max_nodes, tokens=(1, 2, 4))]).drafts
        assert len(answer.draft) == length


@pytest.mark.parametrize("wished", [1.0, 1.5, 3.0, 3.8, 6.0, 8.0])
def test_verifying_its_drafts_emits_the_wished_number_of_tokens_per_step(wished: float) -> None:
    """Walked as the verifier walks, along the recorded answer; log-probabilities are the probability of being right."""
    probability = acceptance_probability(wished, 7)
    replay = drafter(7, probability)
    prompt, answer = RECORDED[0].prompt, RECORDED[0].answer
    emitted, steps, sent = 1, 0, 0
    while emitted < len(answer) - 8:
        committed = [*prompt, *answer[: emitted - 1]]
        new = tuple(committed[sent:])
        (item,) = replay.work([ask(len(committed), answer[emitted - 1], tokens=new, start=sent)]).drafts
        sent = len(committed)
        assert item.draft.log_probs == [math.log(max(probability, 1e-6))] * 7
        expected = answer[emitted : emitted + 8]
        _, chosen = walk(item.draft, lambda index, depth, expected=expected: expected[depth])  # type: ignore[misc]
        emitted += len(chosen)
        steps += 1
    assert emitted / steps == pytest.approx(wished, rel=0.1)


def test_an_acceptance_length_that_a_block_cannot_have_is_refused() -> None:
    for wrong in (0.5, 8.5):
        with pytest.raises(ValueError, match=r"must be in \[1, 8\] with 7 nodes"):
            acceptance_probability(wrong, 7)


def test_a_recording_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    save_recording(tmp_path / "answers.json", RECORDED)
    assert load_recording(tmp_path / "answers.json") == RECORDED
