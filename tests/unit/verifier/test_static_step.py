"""Steps of fixed shape decide what steps of any shape decide, leave the same KV and features, and could be captured."""

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.draft_tree import Draft
from tandem.graphs import EagerDriver
from tandem.sampling import SamplingParams
from tests.fakes.capture_guard import Candidate, CaptureFault, check_capturable
from tests.fakes.random_targets import random_architecture
from tests.fakes.thread_ranks import run_ranks
from tests.fakes.tiny_models import constant_draft
from tests.unit.verifier.steps import (
    BLOCK_TOKENS,
    CPU,
    KV_BLOCKS,
    Hand,
    RecordingModel,
    kv_of,
    make_runner,
    run,
)
from verifier_service.buckets import Bucket, BucketLimits, buckets_of, smallest_for
from verifier_service.features import FeatureProjection
from verifier_service.model_runner import NO_BUCKET, ModelRunner
from verifier_service.models.loading import load_model
from verifier_service.parallel.ranks import Parallel
from verifier_service.static_step import StaticPlan, StaticStep
from verifier_service.step import RankStep, SegmentRows
from verifier_service.step_executor import StepExecutor

LIMITS = BucketLimits(rows=64, sequences=4, nodes=40, context=256)
KINDS = {"gqa": "qwen3", "moe": "qwen3-moe", "mla with moe": "deepseek-v3"}
PROMPTS = [[5, 6, 7], list(range(40)), list(range(100, 116)), [9] * 17]


def plan(limits: BucketLimits = LIMITS, together: bool = False) -> StaticPlan:
    return StaticPlan(limits, EagerDriver(), eager_fallback=True, together=together)


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and a draft model for it."""
    root = tmp_path_factory.mktemp("models")
    random_architecture(root / "target", KINDS[request.param])
    constant_draft(root / "draft", 500)
    return root


def around(truth: list[int], wrong: int) -> Draft:
    """A tree that leads to the first three tokens of a text by nodes 2, 4 and 6."""
    tokens = [wrong, truth[0], wrong, truth[1], wrong + 1, truth[2], wrong + 2]
    return Draft(tokens, [0, 0, 1, 2, 2, 4, 5], [0.0] * 7)


def wide_tree(truth: list[int]) -> Draft:
    """40 nodes, of which the last three are right: their bits are in the second word."""
    tokens = [*range(200, 237), *truth[:3]]
    return Draft(tokens, [*range(10), *[3] * 27, 0, 38, 39], [0.0] * 40)


def texts(runner: ModelRunner, sampling: SamplingParams) -> list[list[int]]:
    """What plain decoding emits after each prompt."""
    hands = [Hand(i, list(prompt), sampling) for i, prompt in enumerate(PROMPTS)]
    for _ in range(12):
        run(runner, [hand.segment() for hand in hands])
    return [hand.sequence.tokens[len(prompt) :] for hand, prompt in zip(hands, PROMPTS, strict=True)]


def drive(runner: ModelRunner, truth: list[list[int]], sampling: SamplingParams) -> tuple[list[object], list[Hand]]:
    """Chunks, plain tokens, chains and trees, right and wrong ones, mixed; what each step chose."""
    a, b, c, d = hands = [Hand(4 + i, list(prompt), sampling) for i, prompt in enumerate(PROMPTS)]

    def ahead(hand: Hand, number: int) -> list[int]:
        return truth[number][hand.sequence.emitted :]

    steps = [
        run(runner, [a.segment(), b.segment(23)]),
        run(runner, [b.segment(), a.segment(draft=around(ahead(a, 0), 300)), c.segment(10)]),
        run(runner, [b.segment(draft=ahead(b, 1)[:4]), a.segment(), c.segment(), d.segment()]),
        run(runner, [a.segment(draft=wide_tree(ahead(a, 0)))]),
        run(runner, [d.segment(draft=around(ahead(d, 3), 400)), c.segment(draft=[1, 2, 3]), b.segment()]),
    ]
    return list(steps), hands


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_static_steps_decide_and_leave_what_others_do(target: Path, temperature: float) -> None:
    """fp32: KV, features and log-probs to 1e-4, tokens equal."""
    sampling = SamplingParams(temperature=temperature, seed=11)
    eager, _ = make_runner(target / "target", draft_folder=target / "draft")
    static, _ = make_runner(target / "target", draft_folder=target / "draft", static=plan())
    truth = texts(eager, sampling)
    expected, eager_hands = drive(eager, truth, sampling)
    got, static_hands = drive(static, truth, sampling)
    assert got == expected
    assert static.static
    assert sum(state.runs for state in static.static.states()) == 5, "a step was not static"
    assert max(len(chosen) for chosen in got[1]) == 4, "a tree was accepted in part"  # type: ignore[arg-type]
    for mine, theirs in zip(static_hands, eager_hands, strict=True):
        count = mine.sequence.committed
        torch.testing.assert_close(kv_of(static, mine, count), kv_of(eager, theirs, count), atol=1e-4, rtol=1e-4)
        features = [
            torch.frombuffer(bytearray(runner.read_features(hand.blocks, 0, count)), dtype=torch.float32)
            for runner, hand in ((static, mine), (eager, theirs))
        ]
        torch.testing.assert_close(*features, atol=1e-3, rtol=1e-3)


def test_logits_equal_the_other_path(target: Path) -> None:
    """fp32, tolerance 2e-4, of every row that chooses: plain, chain and tree in one step, behind prompts in chunks."""
    found = []
    for static in (None, plan()):
        runner, model = make_runner(target / "target", static=static)
        hands = [Hand(i, list(prompt)) for i, prompt in enumerate(PROMPTS[:3])]
        run(runner, [hands[0].segment(), hands[1].segment(30)])
        rows = [model.last_logits[:1].clone()]
        run(runner, [hands[1].segment(), hands[2].segment()])
        rows.append(model.last_logits[:2].clone())
        run(runner, [hands[0].segment(draft=around([1, 2, 3], 7)), hands[1].segment(draft=[4, 5]), hands[2].segment()])
        rows.append(model.last_logits[: 8 + 3 + 1].clone())
        found.append(torch.cat(rows))
    torch.testing.assert_close(found[1], found[0], atol=2e-4, rtol=2e-4)


def test_log_probs_and_routing_are_of_the_real_rows(target: Path) -> None:
    eager, _ = make_runner(target / "target")
    static, _ = make_runner(target / "target", static=plan())
    results = []
    for runner in (eager, static):
        hand = Hand(0, [1, 2, 3, 4, 5])
        object.__setattr__(hand.sequence.request, "log_probs", True)
        results.append(runner.run([hand.segment()]))
    torch.testing.assert_close(*(torch.tensor(r.verdicts[0].log_probs) for r in results), atol=1e-4, rtol=1e-4)
    mine, theirs = results[1].routing, results[0].routing
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        assert mine.shape == theirs.shape
        assert ([set(row) for layer in mine for row in layer]) == [set(row) for layer in theirs for row in layer]


def kinds_of_steps(hands: list[Hand]) -> dict[str, list[SegmentRows]]:
    """Each fits the same bucket; greedy sequences with enough KV behind them."""
    a, b, c, d = hands
    tree = around([7, 8, 9], 300)
    return {
        "decode": [h.segment(1).for_ranks() for h in hands],
        "block": [a.segment(1, [1, 2, 3]).for_ranks(), b.segment(1, [4] * 7).for_ranks()],
        "tree": [c.segment(1, tree).for_ranks(), b.segment(1, tree).for_ranks(), a.segment(1, tree).for_ranks()],
        "prompt": [SegmentRows(9, 3, list(range(31)), [], b.blocks)],
        "mixed": [SegmentRows(9, 30, list(range(12)), [], d.blocks), a.segment(1, tree).for_ranks(),
                  b.segment(1, [4] * 7).for_ranks(), c.segment(1).for_ranks()],
        "empty": [],
    }  # fmt: skip


def logit_rows(rows: list[SegmentRows]) -> list[int]:
    """Prompts choose by their last row."""
    chosen: list[int] = []
    first = 0
    for segment in rows:
        chosen += [first + segment.rows - 1] if segment.rows > 8 else range(first, first + segment.rows)
        first += segment.rows
    return chosen


def test_the_capture_guard_passes_for_every_kind_of_step(target: Path) -> None:
    """With taps and their projection."""
    bucket = Bucket(32, 4, 32)
    hands = [Hand(i, list(range(30 + i))) for i in range(4)]
    for hand in hands:
        hand.sequence.committed = 29
    steps = kinds_of_steps(hands)
    built: list[StaticStep] = []

    def build() -> Candidate:
        model = load_model(CheckpointFolder(target / "target"), torch.float32, CPU)
        features = FeatureProjection(target / "draft", model.config, torch.float32, CPU)
        runner = ModelRunner(model, features, KV_BLOCKS, BLOCK_TOKENS, CPU, static=plan())
        assert runner.static
        runner.capture()
        built.append(runner.static)
        step = runner.static._prepared(bucket)
        pools = (runner._executor.kv, runner._feature_pool._pool)
        return Candidate(step, (*pools, runner.static._inputs, runner.static._outputs, runner.static._logits))

    def change(kind: str) -> Callable[[], None]:
        def write() -> None:
            greedy = [True] * len(steps[kind])
            built[0]._on_host[bucket][0].write(steps[kind], BLOCK_TOKENS, logit_rows(steps[kind]), greedy)

        return write

    with torch.inference_mode():
        check_capturable(build, [change(kind) for kind in steps])


def test_the_capture_guard_fails_for_a_model_that_leaves_padding_rows_out(target: Path) -> None:
    """As experts do without tables: how many rows are real is a Python value then."""

    def build() -> Candidate:
        runner, model = make_runner(target / "target", static=plan())
        assert runner.static
        model.model.wants_tables = False
        original = runner._executor.table_batch

        def without(inputs: object) -> object:
            batch = original(inputs)  # type: ignore[arg-type]
            real = int(batch.tables.first_rows[-1])  # type: ignore[union-attr]
            object.__setattr__(batch, "padding", len(batch.token_ids) - real)
            return batch

        runner._executor.table_batch = without  # type: ignore[method-assign, assignment]
        return Candidate(runner.static._prepared(Bucket(32, 4, 32)), ())

    with torch.inference_mode(), pytest.raises(CaptureFault, match="waits for the device"):
        check_capturable(build, [])


def test_larger_steps_and_longer_texts_than_any_bucket_run_as_before(tmp_path: Path) -> None:
    random_architecture(tmp_path, "qwen3")
    small = plan(BucketLimits(rows=8, sequences=2, nodes=7, context=32))
    eager, _ = make_runner(tmp_path)
    static, _ = make_runner(tmp_path, static=small)
    for prompt in (list(range(20)), list(range(45))):
        chosen = []
        for runner in (eager, static):
            hand = Hand(0, list(prompt))
            first = runner.run([hand.segment()])
            assert first.fallback == (NO_BUCKET if runner is static else None)
            chosen.append(first.verdicts)
        assert chosen[0] == chosen[1]
    # With enough rows, and positions beyond the tables.
    late = Hand(1, list(range(45)))
    run(static, [late.segment(44)])
    assert static.run([late.segment()]).fallback == NO_BUCKET
    early = Hand(2, list(range(5)))
    assert static.run([early.segment()]).fallback is None


def test_ranks_take_the_same_bucket_and_compute_together(tmp_path: Path) -> None:
    """Two ranks, heads and experts split: what one rank alone decides."""
    random_architecture(tmp_path, "deepseek-v3")
    alone, _ = make_runner(tmp_path)
    sampling = SamplingParams(temperature=0.0)
    truth = texts(alone, sampling)
    expected, _ = drive(alone, truth, sampling)
    mailbox: SimpleQueue[RankStep | None] = SimpleQueue()

    def work(parallel: Parallel) -> list[object]:
        model = load_model(CheckpointFolder(tmp_path), torch.float32, CPU, parallel)
        if parallel.ranks.rank == 0:
            try:
                leader = ModelRunner(
                    RecordingModel(model), None, KV_BLOCKS, BLOCK_TOKENS, CPU, mailbox.put, plan(together=True)
                )
                leader.capture()
                return drive(leader, truth, sampling)[0]
            finally:
                mailbox.put(None)
        executor = StepExecutor(model, KV_BLOCKS, BLOCK_TOKENS, CPU)
        static = StaticStep(executor, model, plan(together=True), decides=False)
        static.capture()
        while step := mailbox.get():
            executor.move(step.moves)
            bucket = static.bucket_for(step.segments, len(step.logit_rows))
            assert bucket
            static.run(bucket, step.segments, step.logit_rows, [False] * len(step.segments))
        return []

    with torch.inference_mode():
        assert run_ranks(2, True, False, work)[0] == expected


@pytest.mark.parametrize(
    ("rows", "sequences", "nodes", "min_rows"),
    [(512, 32, 32, 2), (512, 128, 256, 2), (512, 8, 0, 4), (1, 1, 0, 4), (100, 3, 7, 2), (512, 1, 32, 2)],
)
def test_buckets_are_few_and_hold_every_step_within_their_limits(
    rows: int, sequences: int, nodes: int, min_rows: int
) -> None:
    limits = BucketLimits(rows, sequences, nodes, 100)
    buckets = buckets_of(limits, min_rows)
    assert len(buckets) <= 40
    assert buckets == sorted(buckets, reverse=True)
    assert all(b.choosing >= min_rows for b in buckets)
    for count in {c for c in (1, 2, sequences // 2, sequences) if 0 < c <= sequences}:
        for total in {count, count * (1 + nodes), rows}:
            if count <= total <= rows:
                choosing = min(total, count * (1 + nodes))
                bucket = smallest_for(buckets[::-1], total, count, choosing)
                assert bucket, (total, count)
                assert bucket.rows <= max(min_rows, total * 3 // 2, total + 4)
