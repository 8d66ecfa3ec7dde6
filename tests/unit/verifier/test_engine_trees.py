"""The engine over the real model runner: random trees, little room and sampling change nothing that is emitted."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tandem.speculation import DraftShape, Round, SequenceDraft, SpeculationMode
from tests.fakes.fake_target import Bench, ThreadedDrafter
from tests.fakes.tiny_models import VOCAB, random_target
from tests.fakes.trees import tree_around
from tests.unit.verifier.steps import BLOCK_TOKENS, make_runner
from verifier_service.model_runner import ModelRunner
from verifier_service.step import Segment, StepResult

PROMPTS = [random.Random(i).choices(range(VOCAB), k=n) for i, n in enumerate((3, 16, 17, 40, 29, 8))]
TOKENS = 30


@dataclass
class TreeDrafter(ThreadedDrafter):
    """Sends random trees with paths along the right texts. Sequences are known by their anchors and positions."""

    texts: list[list[int]]
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def answer(self, work: Round) -> list[SequenceDraft]:
        drafts = []
        for r in work.requests:
            assert r.shape is DraftShape.TREE
            known = (t for t in self.texts if t[r.base_position : r.base_position + 1] == [r.anchor])
            truth = next(known)[r.base_position + 1 :]
            draft = tree_around(truth, r.max_nodes, VOCAB, self.rng)
            drafts.append(SequenceDraft(r.sequence_id, r.epoch, r.base_position, draft))
        return drafts


def audited(bench: Bench, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step's rows, nodes included, have room in their own sequence's blocks, and the books balance."""
    run = runner.run

    def checked(segments: list[Segment]) -> StepResult:
        bench.scheduler.audit()
        assert all(s.start + s.rows <= len(s.blocks) * BLOCK_TOKENS for s in segments)
        return run(segments)

    monkeypatch.setattr(runner, "run", checked)


@pytest.mark.parametrize("blocks", [64, 10], ids=["much room", "little room"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_change_speed_never_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, blocks: int
) -> None:
    """Off and tree give the same ids, also where sequences are preempted; and a text that trees emitted serves as the
    prefix of another request."""
    random_target(tmp_path)
    runner, _ = make_runner(tmp_path)
    bench = Bench(blocks=blocks, block_tokens=BLOCK_TOKENS, runner=runner)
    audited(bench, runner, monkeypatch)
    plain = bench.answers(SpeculationMode.OFF, temperature, PROMPTS, TOKENS)
    before = bench.metric("tandem_preemptions_total")
    texts = [[*p, *a.tokens] for p, a in zip(PROMPTS, plain, strict=True)]
    drafter = TreeDrafter(bench.engine, texts)
    drafted = bench.answers(SpeculationMode.TREE, temperature, PROMPTS, TOKENS)
    assert [a.tokens for a in drafted] == [a.tokens for a in plain]
    counts = [a.last.sequence.counts for a in drafted]
    assert sum(c.accepted for c in counts) > sum(c.drafts for c in counts) / 2
    assert (bench.metric("tandem_preemptions_total") > before) == (blocks == 10)
    resumed = bench.answers(SpeculationMode.OFF, temperature, [t[:-5] for t in texts], 5)
    assert [a.tokens for a in resumed] == [t[-5:] for t in texts]
    cached = [a.last.sequence.cached_prompt_tokens for a in resumed]
    if blocks == 64:
        assert cached == [(len(t) - 6) // BLOCK_TOKENS * BLOCK_TOKENS for t in texts]
    drafter.leave()
    bench.close()
