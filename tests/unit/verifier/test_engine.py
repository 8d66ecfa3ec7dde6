"""The engine: whatever drafters do and however little room there is, what is emitted is the plain loop's output."""

import random
import time
from collections.abc import Iterator

import pytest

from tandem.errors import InvalidRequest, Overloaded, Unavailable
from tandem.speculation import SequenceDraft, SpeculationMode
from tests.fakes.fake_target import BLOCK_SIZE, VOCAB, Bench, FakeDrafter, continuation
from verifier_service.drafting import DraftReply
from verifier_service.sequence import FinishReason
from verifier_service.speculation.controller import PROBE_STEPS, Reason


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def wrong(right: list[int]) -> list[int]:
    return [(t + 1) % VOCAB for t in right]


def half_right(right: list[int]) -> list[int]:
    return [t if i < len(right) // 2 else (t + 1) % VOCAB for i, t in enumerate(right)]


def until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.002)


def test_without_a_drafter_it_decodes_plainly(bench: Bench) -> None:
    answer = bench.submit([1, 2, 3], 20).wait()
    assert answer.tokens == continuation([1, 2, 3], 20)
    assert answer.last.finish_reason is FinishReason.LENGTH
    assert answer.last.sequence.counts.drafts == 0


@pytest.mark.parametrize("edit", [lambda r: r, wrong, half_right], ids=["right", "wrong", "half right"])
def test_drafts_change_speed_never_tokens(bench: Bench, edit: object) -> None:
    drafter = FakeDrafter(bench.engine, edit)  # type: ignore[arg-type]
    prompts = [[i, i + 1, 3 * i % VOCAB] * (i + 1) for i in range(12)]
    answers = [bench.submit(p, 30) for p in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.wait().tokens == continuation(prompt, 30)
    counts = [a.last.sequence.counts for a in answers]
    accepted, drafted = sum(c.accepted for c in counts), sum(c.drafted for c in counts)
    assert drafted > 0
    expected = {wrong: 0}.get(edit)  # type: ignore[call-overload]
    assert accepted == expected if expected is not None else accepted > 0
    assert not drafter.faults
    drafter.leave()


def test_all_right_drafts_take_one_step_per_block(bench: Bench) -> None:
    drafter = FakeDrafter(bench.engine)
    answer = bench.submit([5], 1 + 5 * BLOCK_SIZE).wait()
    counts = answer.last.sequence.counts
    assert (counts.steps, counts.drafts, counts.accepted) == (5, 5, 5 * (BLOCK_SIZE - 1))
    assert counts.accepted_per_position == [5, 5, 5]
    drafter.leave()


def test_counts_agree_everywhere(bench: Bench) -> None:
    """Ids streamed = usage = counter of emitted tokens = totals; accepted per position sums to accepted."""
    drafter = FakeDrafter(bench.engine, half_right)
    answers = [bench.submit([i], 17).wait() for i in range(3)]
    drafter.leave()
    for a in answers:
        assert len(a.tokens) == a.last.sequence.emitted == 17
        assert sum(a.last.sequence.counts.accepted_per_position) == a.last.sequence.counts.accepted
    assert bench.metric("tandem_generation_tokens_total") == 51 == bench.engine.load().totals.emitted
    drafted = sum(a.last.sequence.counts.drafted for a in answers)
    assert bench.metric("tandem_spec_decode_num_draft_tokens_total") == drafted


def test_a_stop_inside_an_accepted_block_ends_there(bench: Bench) -> None:
    drafter = FakeDrafter(bench.engine)
    truth = continuation([9, 9], 30)
    for stop_at in range(3, 12):
        first = truth.index(truth[stop_at])
        answer = bench.submit([9, 9], 30, stop_token_ids=frozenset({truth[stop_at]})).wait()
        assert answer.tokens == truth[: first + 1]
        assert answer.last.finish_reason is FinishReason.STOP
    drafter.leave()


def test_a_draft_never_reaches_beyond_max_tokens(bench: Bench) -> None:
    drafter = FakeDrafter(bench.engine)
    for max_tokens in range(1, 8):
        assert bench.submit([4], max_tokens).wait().tokens == continuation([4], max_tokens)
    nodes = [(s.nodes, s.sequence.request.max_tokens) for step in bench.runner.steps for s in step]
    assert all(n < m for n, m in nodes)
    drafter.leave()


def test_preemption_by_recompute_changes_nothing() -> None:
    """Room for about two of six sequences: they take turns, every text is whole, drafters follow the epochs."""
    bench = Bench(blocks=16, block_tokens=4)
    drafter = FakeDrafter(bench.engine, half_right)
    prompts = [[i, 7, i] for i in range(6)]
    answers = [bench.submit(p, 40) for p in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.wait().tokens == continuation(prompt, 40)
    assert bench.metric("tandem_preemptions_total") > 0
    assert not drafter.faults
    drafter.leave()
    bench.close()


def test_a_long_prompt_is_prefilled_in_chunks_while_others_stream(bench: Bench) -> None:
    bench.runner.delay = 0.002
    first = bench.submit([1], 60)
    until(lambda: len(first.tokens) > 3)
    long = bench.submit([2] * 100, 5)
    assert long.wait().tokens == continuation([2] * 100, 5)
    mixed = [step for step in bench.runner.steps if any(len(s.token_ids) > 1 for s in step) and len(step) == 2]
    assert len(mixed) >= 100 // 16
    assert first.wait().tokens == continuation([1], 60)


def test_a_prefix_hit_brings_its_features(bench: Bench) -> None:
    """The second request reuses the first one's blocks, and its drafter is still sent the whole context."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    drafter = FakeDrafter(bench.engine)
    bench.submit(prompt, 5).wait()
    answer = bench.submit(prompt, 9).wait()
    assert answer.last.sequence.cached_prompt_tokens == 8
    assert answer.tokens == continuation(prompt, 9)
    assert answer.last.sequence.counts.accepted == answer.last.sequence.counts.drafted > 0
    assert not drafter.faults
    drafter.leave()


def test_an_undrafted_request_sends_no_features(bench: Bench) -> None:
    drafter = FakeDrafter(bench.engine)
    answer = bench.submit([1, 2], 12, speculation_mode=SpeculationMode.OFF).wait()
    assert answer.tokens == continuation([1, 2], 12)
    assert bench.metric("tandem_feature_bytes_sent_total") == 0
    assert not drafter.held
    drafter.leave()


def test_a_resumed_generation_goes_on_where_it_was(bench: Bench) -> None:
    truth = continuation([8, 1], 20)
    drafter = FakeDrafter(bench.engine, half_right)
    answer = bench.submit([8, 1, *truth[:7]], 20, prompt_length=2).wait()
    assert answer.tokens == truth[7:]
    drafter.leave()


@pytest.mark.parametrize("overlap", [True, False])
def test_without_overlap_a_step_waits_for_all_drafts(overlap: bool) -> None:
    bench = Bench(overlap=overlap)
    drafter = FakeDrafter(bench.engine)
    answers = [bench.submit([i], 40) for i in range(4)]
    for i, answer in enumerate(answers):
        assert answer.wait().tokens == continuation([i], 40)
    decodes = [step for step in bench.runner.steps if all(len(s.token_ids) == 1 for s in step)]
    undrafted = [s for step in decodes for s in step if s.nodes == 0 and s.sequence.remaining > 1]
    assert not undrafted, "a sequence stepped without the draft it could have waited for"
    if not overlap:
        assert max(len(step) for step in decodes) == 4
    drafter.leave()
    bench.close()


def test_a_late_drafter_costs_one_timeout_and_returns_when_it_answers() -> None:
    bench = Bench(draft_timeout=0.05)
    drafter = FakeDrafter(bench.engine)
    drafter.answers = False
    started = time.monotonic()
    answer = bench.submit([6], 40).wait()
    assert answer.tokens == continuation([6], 40)
    assert time.monotonic() - started < 1.0
    assert bench.metric("tandem_discarded_drafts_total", reason="late") == 1
    drafter.answers = True
    drafter.drafter.silent_until = 0.0
    assert bench.submit([6], 40).wait().last.sequence.counts.accepted > 0
    drafter.leave()
    bench.close()


def test_a_stale_draft_is_dropped(bench: Bench) -> None:
    drafter = FakeDrafter(bench.engine)
    drafter.answers = False
    answer = bench.submit([6, 6], 6)
    until(lambda: drafter.held)
    from tandem.draft_tree import Draft

    for sequence_id, epoch, base in ((1, 0, 1), (1, 1, 2), (9, 0, 2)):
        draft = SequenceDraft(sequence_id, epoch, base, Draft.block([1], [0.0]))
        bench.engine.deliver(drafter.drafter, DraftReply([draft], 0))
    until(lambda: bench.metric("tandem_discarded_drafts_total", reason="stale") == 3)
    drafter.leave()
    assert answer.wait().tokens == continuation([6, 6], 6)


def test_drafters_come_and_go_under_running_streams(bench: Bench) -> None:
    bench.runner.delay = 0.001
    prompts = [[i] for i in range(6)]
    answers = [bench.submit(p, 150) for p in prompts]
    for i in range(5):
        drafter = FakeDrafter(bench.engine, half_right, name=f"d{i}")
        until(lambda d=drafter: len(d.held) == 6 or all(a.done.is_set() for a in answers))
        time.sleep(0.01)
        drafter.leave()
        assert not drafter.faults
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.wait().tokens == continuation(prompt, 150)
        assert answer.last.sequence.counts.accepted > 0


def test_two_drafters_share_the_sequences(bench: Bench) -> None:
    bench.runner.delay = 0.001
    drafters = [FakeDrafter(bench.engine, name=n) for n in "ab"]
    answers = [bench.submit([i], 40) for i in range(6)]
    until(lambda: all(len(d.held) == 3 for d in drafters))
    for i, answer in enumerate(answers):
        assert answer.wait().tokens == continuation([i], 40)
    for drafter in drafters:
        until(lambda d=drafter: not d.held)
        assert not drafter.faults
        drafter.leave()


def test_a_drafter_that_lost_a_sequence_is_sent_it_again(bench: Bench) -> None:
    bench.runner.delay = 0.002
    drafter = FakeDrafter(bench.engine)
    answer = bench.submit([1, 2, 3], 120)
    until(lambda: len(answer.tokens) > 10)
    before = len(answer.tokens)
    drafter.held.clear()
    drafter.faults.clear()
    assert answer.wait().tokens == continuation([1, 2, 3], 120)
    assert answer.last.sequence.counts.steps < (120 - before) / 2
    drafter.leave()


def test_abort_frees_and_frees_only_its_own(bench: Bench) -> None:
    bench.runner.delay = 0.002
    keep, gone = bench.submit([1], 50, request_id="keep"), bench.submit([2], 50, request_id="gone")
    until(lambda: len(gone.tokens) > 3)
    bench.engine.abort("gone")
    bench.engine.abort("never heard of")
    assert gone.wait().last.finish_reason is FinishReason.ABORTED
    assert keep.wait().tokens == continuation([1], 50)
    assert bench.engine.load().kv_used == 0


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(bench: Bench) -> None:
    bench.runner.delay = 0.002
    first = bench.submit([1], 20, request_id="same")
    second = bench.submit([2], 20, request_id="same").wait()
    assert isinstance(second.last.error, InvalidRequest)
    assert first.wait().tokens == continuation([1], 20)


def test_a_full_queue_is_refused() -> None:
    bench = Bench(max_running=1, max_waiting=2)
    bench.runner.delay = 0.005
    answers = [bench.submit([i], 20) for i in range(6)]
    errors = [a.wait().last.error for a in answers]
    assert sum(isinstance(e, Overloaded) for e in errors) >= 2
    for i, answer in enumerate(answers):
        if answer.last.error is None:
            assert answer.tokens == continuation([i], 20)
    bench.close()


def test_a_failed_step_ends_its_sequences_and_nothing_else(bench: Bench) -> None:
    bench.runner.fail_next = True
    failed = bench.submit([1], 5).wait()
    assert isinstance(failed.last.error, MemoryError)
    assert bench.submit([1], 5).wait().tokens == continuation([1], 5)


def test_stop_ends_live_sequences_as_unavailable() -> None:
    bench = Bench()
    bench.runner.delay = 0.005
    answer = bench.submit([1], 200)
    until(lambda: answer.tokens)
    bench.close()
    assert isinstance(answer.wait().last.error, Unavailable)


@pytest.mark.parametrize("seed", range(4))
def test_random_histories(seed: int) -> None:
    """Little room, aborts, drafters that come, go and err: every stream that ends by itself is the plain loop's."""
    rng = random.Random(seed)
    bench = Bench(
        blocks=rng.choice([14, 20, 40]), max_running=rng.choice([2, 5]), draft_timeout=0.02, overlap=seed % 2 == 0
    )
    edits = [lambda r: r, wrong, half_right]
    drafters: list[FakeDrafter] = []
    jobs = []
    for i in range(40):
        shared = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(1, 8)]
        prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
        count = rng.randint(1, 30)
        answer = bench.submit(prompt, count, speculation_mode=rng.choice(list(SpeculationMode)), request_id=f"j{i}")
        jobs.append((prompt, count, answer))
        if rng.random() < 0.2:
            bench.engine.abort(f"j{rng.randrange(i + 1)}")
        if rng.random() < 0.15:
            drafters.append(FakeDrafter(bench.engine, rng.choice(edits), name=str(i)))
            drafters[-1].answers = rng.random() < 0.8
        if drafters and rng.random() < 0.1:
            drafters.pop().leave()
        time.sleep(rng.random() * 0.004)
    for prompt, count, answer in jobs:
        answer.wait()
        if answer.last.finish_reason is FinishReason.LENGTH:
            assert answer.tokens == continuation(prompt, count)
        else:
            assert answer.tokens == continuation(prompt, len(answer.tokens))
    for drafter in drafters:
        drafter.leave()
        assert not drafter.faults
    bench.close()


def test_tree_mode_asks_for_trees_and_verifies_all_of_them(bench: Bench) -> None:
    drafter = FakeDrafter(bench.engine)
    answer = bench.submit([5], 41, speculation_mode=SpeculationMode.TREE, max_draft_nodes=6).wait()
    assert answer.tokens == continuation([5], 41)
    nodes = {s.nodes for step in bench.runner.steps for s in step if 0 < s.start < 30}
    assert nodes == {6}
    counts = answer.last.sequence.counts
    assert counts.steps == 11, "four tokens per step, but for the last trees, which max_tokens cuts"
    assert counts.accepted_per_position == [11, 9, 9]
    drafter.leave()


def test_a_requests_node_limit_holds_in_every_mode(bench: Bench) -> None:
    drafter = FakeDrafter(bench.engine)
    modes = (SpeculationMode.BLOCK, SpeculationMode.TREE, SpeculationMode.AUTO)
    answers = [bench.submit([i], 40, speculation_mode=mode, max_draft_nodes=2) for i, mode in enumerate(modes)]
    for i, answer in enumerate(answers):
        assert answer.wait().tokens == continuation([i], 40)
        assert answer.last.sequence.counts.drafted > 0
    assert max(s.nodes for step in bench.runner.steps for s in step) == 2
    drafter.leave()


def test_auto_speculates_where_it_pays(bench: Bench) -> None:
    """Right drafts at a small part of a step's time."""
    bench.runner.delay = 0.005
    drafter = FakeDrafter(bench.engine)
    answer = bench.submit([3], 240, speculation_mode=SpeculationMode.AUTO).wait()
    assert answer.tokens == continuation([3], 240)
    assert bench.controller.speculating
    assert answer.last.sequence.counts.steps < 240 / 2
    drafter.leave()


def test_auto_that_does_not_pay_drafts_nothing_and_sends_nothing_while_fixed_modes_go_on() -> None:
    """A drafter far slower than a step: after learning, only rare probes for auto sequences; a block sequence is
    drafted for in every step all the same. What was not sent meanwhile is sent for a probe, so none meets a gap."""
    bench = Bench(blocks=400)
    bench.runner.delay = 0.001
    drafter = FakeDrafter(bench.engine, wrong, delay=0.01)
    learning = bench.submit([4], 500, speculation_mode=SpeculationMode.AUTO).wait()
    assert learning.tokens == continuation([4], 500)
    assert not bench.controller.speculating
    sent = bench.metric("tandem_feature_bytes_sent_total")
    auto = bench.submit([5], 300, speculation_mode=SpeculationMode.AUTO).wait()
    assert auto.tokens == continuation([5], 300)
    assert auto.last.sequence.counts.drafts <= 12
    assert bench.metric("tandem_feature_bytes_sent_total") - sent <= 300, "each position at most once"
    fixed = bench.submit([6], 30, speculation_mode=SpeculationMode.BLOCK)
    also = bench.submit([7], 100, speculation_mode=SpeculationMode.AUTO)
    assert fixed.wait().last.sequence.counts.drafts >= 27
    assert also.wait().last.sequence.counts.drafts <= 12
    assert not drafter.faults
    drafter.leave()
    bench.close()


def test_a_choice_is_counted_and_shown() -> None:
    bench = Bench()
    assert bench.engine.load().speculation.reason == "no drafter"
    drafter = FakeDrafter(bench.engine)
    bench.submit([3], 60, speculation_mode=SpeculationMode.AUTO).wait()
    assert bench.metric("tandem_spec_choices_total", mode="tree", reason="learning") > 0
    assert bench.metric("tandem_spec_chosen_nodes_count") > 0
    assert bench.metric("tandem_spec_measured_step_seconds_total") > 0
    assert bench.metric("tandem_spec_expected_tokens_total") > 0
    assert bench.metric("tandem_spec_drafted_mass_per_pos_total", position="0") > 0
    present = bench.engine.load().speculation
    assert present.reason == "learning"
    assert present.calibration
    drafter.leave()
    bench.close()


@pytest.mark.slow
def test_auto_turns_off_when_the_drafter_slows_down_and_on_when_it_is_quick_again() -> None:
    """A drafter 50 ms slower per draft costs more than its drafts bring: no more are asked for, probes apart. Quick
    again, a probe finds out, and drafts are asked for again."""
    bench = Bench(blocks=2049, block_tokens=8, overlap=False)
    drafter = FakeDrafter(bench.engine)
    bench.runner.delay = 0.01
    answer = bench.submit([1, 2, 3], 16_000, speculation_mode=SpeculationMode.AUTO)

    def wait_until(mode: SpeculationMode, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while bench.engine.load().speculation.mode is not mode or bench.controller.order.reason is Reason.LEARNING:
            assert time.monotonic() < deadline, f"not {mode.value} within {seconds}s"
            assert not answer.done.is_set(), "the answer ended before"
            time.sleep(0.01)

    wait_until(SpeculationMode.TREE, 10)
    drafter.delay = 0.05
    wait_until(SpeculationMode.OFF, 15)
    before, steps = bench.metric("tandem_draft_round_trip_seconds_count"), len(bench.runner.steps)
    time.sleep(1.0)
    assert bench.metric("tandem_draft_round_trip_seconds_count") - before <= 2 * PROBE_STEPS
    assert len(bench.runner.steps) - steps > 50
    drafter.delay = 0.0
    wait_until(SpeculationMode.TREE, 60)
    bench.engine.abort("r1")
    answer.wait()
    assert answer.tokens == continuation([1, 2, 3], len(answer.tokens))
    drafter.leave()
    bench.close()
