"""The engine over steps of fixed shape: what is emitted is what it was, and what is said of buckets is so."""

import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tandem.cli.status import _buckets
from tandem.config import StackConfig
from tandem.draft_tree import Draft
from tandem.graphs import EagerDriver, Step
from tandem.speculation import DraftShape, Round, SequenceDraft, SpeculationMode
from tandem.v1 import verification_pb2, verification_pb2_grpc
from tests.fakes.fake_target import MAX_DRAFT_NODES, Bench, ThreadedDrafter
from tests.fakes.served_verifier import served_verifier
from tests.fakes.tiny_models import VOCAB, constant_draft, map_target, random_target
from tests.fakes.trees import tree_around
from tests.unit.verifier.steps import BLOCK_TOKENS, make_runner
from verifier_service.buckets import BucketLimits
from verifier_service.speculation.costs import StepCosts
from verifier_service.speculation.warm_up import StepLimits, measure_steps
from verifier_service.static_plan import plan_static
from verifier_service.static_step import StaticPlan

PROMPTS = [random.Random(i).choices(range(VOCAB), k=n) for i, n in enumerate((3, 16, 17, 40, 29, 8))]
TOKENS = 24
LIMITS = BucketLimits(rows=96, sequences=8, nodes=MAX_DRAFT_NODES, context=160)


@dataclass
class Drafter(ThreadedDrafter):
    """Drafts that are right in part, of the shape that is asked for."""

    texts: list[list[int]]
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def answer(self, work: Round) -> list[SequenceDraft]:
        drafts = []
        for r in work.requests:
            known = (t for t in self.texts if t[r.base_position : r.base_position + 1] == [r.anchor])
            truth = next(known)[r.base_position + 1 :]
            if r.shape is DraftShape.TREE:
                draft = tree_around(truth, r.max_nodes, VOCAB, self.rng)
            else:
                right = truth[: self.rng.randrange(r.max_nodes)]
                wrong = self.rng.choices(range(VOCAB), k=r.max_nodes - len(right))
                draft = Draft.block(right + wrong, [0.0] * r.max_nodes)
            drafts.append(SequenceDraft(r.sequence_id, r.epoch, r.base_position, draft))
        return drafts


class FaultyDriver(EagerDriver):
    """Says it captures; every third replay raises."""

    captures = True

    def capture(self, step: Step) -> Step:
        runs = 0

        def replay() -> None:
            nonlocal runs
            runs += 1
            if runs % 3 == 0:
                raise RuntimeError("a replay failed")
            step()

        return replay


@pytest.mark.parametrize("driver", [EagerDriver, FaultyDriver])
def test_off_block_and_tree_emit_what_steps_of_any_shape_emit(
    tmp_path: Path, driver: Callable[[], EagerDriver]
) -> None:
    """Greedy and sampled, prompts in chunks, sequences preempted; and when replays fail."""
    random_target(tmp_path)
    runner, _ = make_runner(tmp_path)
    bench = Bench(block_tokens=BLOCK_TOKENS, runner=runner)
    expected = {t: [a.tokens for a in bench.answers(SpeculationMode.OFF, t, PROMPTS, TOKENS)] for t in (0.0, 0.8)}
    bench.close()
    static, _ = make_runner(tmp_path, static=StaticPlan(LIMITS, driver(), True, False))
    bench = Bench(blocks=12, block_tokens=BLOCK_TOKENS, runner=static)
    texts = [[*p, *tokens] for t in (0.0, 0.8) for p, tokens in zip(PROMPTS, expected[t], strict=True)]
    drafters = []
    for temperature, tokens in expected.items():
        mine = texts[:6] if temperature == 0.0 else texts[6:]
        assert [a.tokens for a in bench.answers(SpeculationMode.OFF, temperature, PROMPTS, TOKENS)] == tokens
        drafters.append(Drafter(bench.engine, mine))
        for mode in (SpeculationMode.BLOCK, SpeculationMode.TREE):
            drafted = bench.answers(mode, temperature, PROMPTS, TOKENS)
            assert [a.tokens for a in drafted] == tokens
            assert sum(a.last.sequence.counts.accepted for a in drafted) > 10
        drafters[-1].leave()
    assert bench.metric("tandem_preemptions_total") > 0
    assert bench.metric("tandem_graph_fallbacks_total", reason="no_bucket") == 0
    replayed = sum(
        bench.metric("tandem_graph_replays_total", rows=str(rows)) for rows in (4, 8, 16, 24, 32, 48, 64, 96)
    )
    fallbacks = bench.metric("tandem_graph_fallbacks_total", reason="replay")
    if driver is FaultyDriver:
        assert replayed >= 2
        assert fallbacks >= 2
    else:
        assert replayed == fallbacks == 0
    bench.close()


@pytest.mark.parametrize(
    ("mode", "static"), [("off", False), ("auto", False), ("on", True), (True, True), (False, False)]
)
def test_the_mode_decides_on_a_cpu(tmp_path: Path, mode: object, static: bool) -> None:
    """auto means off there. YAML reads bare `on` and `off` as booleans."""
    random_target(tmp_path)
    _, model = make_runner(tmp_path)
    verifier = {"graphs": {"mode": mode}, "max_running_sequences": 4, "max_context": 200, "kv_blocks": 5}
    config = StackConfig.model_validate({"target": tmp_path, "verifier": verifier})
    plan = plan_static(config, model.model, torch.device("cpu"))
    assert (plan is not None) == static
    if plan:
        # Without drafts; rows for all prompt chunks beside the others; positions as far as the KV goes.
        assert plan.limits == BucketLimits(rows=256 + 4, sequences=4, nodes=0, context=4 * 32)
        assert not plan.together


async def test_load_lists_the_buckets_and_status_shows_them(tmp_path: Path) -> None:
    target = map_target(tmp_path / "target", [*range(1, VOCAB), 0])
    draft = constant_draft(tmp_path / "draft", 500)
    verifier = {
        "graphs": {"mode": "on", "max_rows": 24},
        "dtype": "float32",
        "kv_blocks": 20,
        "max_running_sequences": 2,
        "max_draft_nodes": 7,
        "warm_up_seconds": 0.1,
    }
    config = StackConfig.model_validate({"target": target, "draft_model": draft, "verifier": verifier})
    async with served_verifier(config) as served:
        stub = verification_pb2_grpc.VerifierServiceStub(served.channel)
        load = await stub.GetLoad(verification_pb2.GetLoadRequest())
    sizes = [(bucket.rows, bucket.sequences) for bucket in load.graph_buckets]
    assert sizes == [(24, 2), (24, 1), (16, 2), (16, 1), (8, 2), (8, 1), (4, 2), (4, 1)]
    assert all(bucket.reason == "the device has no graphs" and not bucket.captured for bucket in load.graph_buckets)
    assert sum(bucket.runs for bucket in load.graph_buckets) > 4
    assert all(bucket.mean_us > 0 for bucket in load.graph_buckets if bucket.runs)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(_buckets(load))
    shown = console.export_text()
    assert "0 of 8 buckets captured" in shown
    assert shown.count("no: the device has no graphs") == 8


def test_costs_are_measured_by_capacity() -> None:
    """Of captured steps each capacity is measured by the largest step it holds, and a step costs what its capacity
    does."""
    asked: list[int] = []

    def measure(rows: int, sequences: int, context: int) -> float:
        asked.append(rows)
        return 0.01 * (8 if rows <= 8 else 16 if rows <= 16 else 24)

    limits = StepLimits(20, 1, kv_blocks=9, block_tokens=16, max_context=100, capacities=(8, 16, 24, 32))
    curve = measure_steps(measure, limits, 5.0)
    assert set(asked) <= {1, 8, 16, 20}
    assert (curve.rows, curve.capacities) == ((8, 16, 24), limits.capacities)
    costs = StepCosts(curve)
    assert [round(costs.predict(rows, 1, 10.0), 3) for rows in (1, 8, 9, 16, 17, 24)] == [
        0.08, 0.08, 0.16, 0.16, 0.24, 0.24,
    ]  # fmt: skip
