"""Acceptance offline: against a simulation written out plainly, and against the verifier's own sampling."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draft_training.acceptance import Acceptance, Answer, DflashSource, DraftBudget, NgramSource, measure
from draft_training.measurement import ALL, measure_sources, table, with_ngram
from draft_training.recording import record_answers
from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from tandem.speculation import DraftShape
from tests.fakes.tiny_models import HIDDEN, constant_draft, map_target
from tests.unit.training.worlds import CPU, chatting_target, load_target
from verifier_service.sampler import sample

BLOCK_3 = DraftBudget(DraftShape.BLOCK, 3)


def answer(prompt: int, length: int, group: str, seed: int) -> Answer:
    ids = torch.randint(0, 6, (prompt + length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Answer(ids, prompt, group, torch.zeros(prompt + length - 1, 1))


class Scripted:
    """Drafts that depend on answer and position only: a fixed small tree of few tokens, so that some are right."""

    def __init__(self) -> None:
        self.committed: dict[int, int] = {}
        self.drafted: list[tuple[int, int]] = []

    @staticmethod
    def script(ids: list[int], base: int, nodes: int) -> Draft:
        chance = torch.Generator().manual_seed(sum(ids[: base + 1]) * 31 + base)
        tokens, parents = [], []
        for node in range(nodes):
            parents.append(int(torch.randint(0, node + 1, (), generator=chance)))
            taken = {t for t, p in zip(tokens, parents, strict=False) if p == parents[-1]}
            tokens.append(next(t for t in torch.randperm(12, generator=chance).tolist() if t not in taken) % 12)
        return Draft(tokens, parents, [-1.0] * nodes)

    def begin(self, answer: Answer) -> Answer:
        self.committed[id(answer)] = 0
        return answer

    def commit(self, spans: list[tuple[Any, int, int]]) -> None:
        for state, start, end in spans:
            assert start == self.committed[id(state)], "positions are committed in order, without gaps"
            assert end > start
            self.committed[id(state)] = end

    def draft(self, anchors: list[tuple[Any, int]], budget: DraftBudget) -> list[Draft]:
        for state, base in anchors:
            assert self.committed[id(state)] == base, "exactly what lies before the anchor is committed"
        return [self.script(state.ids, base, budget.nodes) for state, base in anchors]


def simulate(answers: list[Answer], nodes: int) -> dict[str, Acceptance]:
    """One answer after another, one token after another."""
    results: dict[str, Acceptance] = {}
    for a in answers:
        found = results.setdefault(a.group, Acceptance())
        base = a.answer_start
        while base < len(a.ids) - 1:
            draft = Scripted.script(a.ids, base, nodes)
            node, accepted = 0, 0
            while True:
                following = [
                    i + 1
                    for i, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))
                    if parent == node and base + accepted + 1 < len(a.ids) and token == a.ids[base + accepted + 1]
                ]
                if not following:
                    break
                node, accepted = following[0], accepted + 1
            emitted = accepted + 1 if base + accepted + 1 < len(a.ids) else accepted
            found.count(nodes, accepted, emitted)
            base += emitted
    return results


def test_measure_is_the_plain_simulation() -> None:
    """Rounds, emitted, drafted and accepted by depth are those of a simulation that knows no batches; every answer's
    tokens behind its first are emitted exactly once."""
    answers = [answer(3, n, "ab"[n % 2], seed=n) for n in (1, 2, 3, 9, 30, 41)]
    for nodes in (1, 5, 12):
        found = measure(Scripted(), answers, DraftBudget(DraftShape.TREE, nodes))
        assert found == simulate(answers, nodes)
        assert sum(f.emitted for f in found.values()) == sum(len(a.ids) - a.answer_start - 1 for a in answers)
    assert max(len(f.accepted_per_depth) for f in found.values()) >= 2, "some drafts should be right"


def test_figures_of_acceptance() -> None:
    """length is emitted per round, per_depth the share of rounds that got so far; groups add up."""
    one, two = Acceptance(), Acceptance()
    one.count(drafted=7, accepted=2, emitted=3)
    one.count(drafted=7, accepted=0, emitted=1)
    two.count(drafted=7, accepted=3, emitted=4)
    assert (one.length, one.per_depth) == (2.0, [0.5, 0.5])
    total = Acceptance()
    for part in (one, two):
        total.add(part)
    assert (total.rounds, total.emitted, total.drafted) == (3, 8, 21)
    assert total.per_depth == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert (Acceptance().length, Acceptance().per_depth) == (0.0, [])


def test_ngram_source_is_the_ngram_drafter() -> None:
    """An answer that repeats its prompt is accepted from the n-gram drafter, block after block."""
    phrase = list(range(20, 40))
    repeating = Answer([*phrase, *phrase, *phrase], 21, "r", torch.zeros(59, 1))
    fresh = Answer(list(range(60)), 21, "f", torch.zeros(59, 1))
    found = measure(NgramSource(), [repeating, fresh], BLOCK_3)
    assert found["r"].length > 3.5
    assert found["f"].length == 1.0


def test_draft_model_source_drafts_as_the_service(tmp_path: Path) -> None:
    """A draft model that always proposes one token is accepted whole in that token's own loop and not at all outside,
    and the table says so by kind."""
    successor = [token if token < 256 else 256 + (token + 1) % 256 for token in range(512)]
    target = map_target(tmp_path / "target", successor)
    draft = constant_draft(tmp_path / "draft", mask_token=7)
    model = load_target(target)
    source = DflashSource(draft, target, model.config, torch.float32, CPU)
    prompts = [("loop", [300, 7]), ("away", [7, 300])]
    answers = record_answers(model, prompts, (0, 1), frozenset(), 17, SamplingParams(temperature=0.0), CPU)
    assert answers[0].ids == [300] + [7] * 18
    assert answers[1].ids == [7, *range(300, 318)]
    (block, tree, *_) = measure_sources(with_ngram(source), answers, 8, [4])
    assert (block.source, block.budget, tree.budget) == ("draft model", "block of 8", "tree of 4")
    assert block.by_group["loop"].length == 8.0
    assert block.by_group["away"].length == 1.0
    assert block.by_group[ALL].rounds == 2 + 16
    rows = table([block, tree], ["loop", "away", ALL])
    assert rows[1] == ["draft model", "block of 8", "8.00", "1.00", f"{32 / 18:.2f}"]


@torch.inference_mode()
def test_recorded_answers_are_what_the_verifier_would_sample(tmp_path: Path) -> None:
    """Every token is sample(logits, seed, position) of transformers' logits at its own prefix, with prompt i's seed
    seed + i, whatever else is in the batch; answers end at an end-of-sequence token or at max_tokens; the taps are
    transformers' hidden states."""
    oracle = chatting_target(tmp_path / "target")
    model = load_target(tmp_path / "target")
    prompts = [
        ("g", torch.randint(3, 400, (n,), generator=torch.Generator().manual_seed(n)).tolist()) for n in range(1, 9)
    ]
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.3, seed=77)):
        answers = record_answers(model, prompts, (0, 2), frozenset({2}), 20, params, CPU)
        for i, (found, (group, ids)) in enumerate(zip(answers, prompts, strict=True)):
            assert (found.group, found.answer_start) == (group, len(ids))
            assert found.ids[: len(ids)] == ids
            written = found.ids[len(ids) :]
            assert 2 not in written[:-1]
            assert len(written) == 20 or written[-1] == 2
            out = oracle(torch.tensor([found.ids[:-1]]), output_hidden_states=True)
            own = SamplingParams(temperature=params.temperature, seed=params.seed + i)
            for position in range(len(ids), len(found.ids)):
                assert found.ids[position] == sample(out.logits[0, position - 1], own, position)
            torch.testing.assert_close(found.taps[:, :HIDDEN].float(), out.hidden_states[1][0], rtol=2**-7, atol=1e-4)
        lengths = {len(a.ids) - a.answer_start for a in answers}
        assert len(lengths) > 1, "some answers should end by themselves"
