"""Captured steps: what runs, in which form, and what is said about it, whatever capture and replay do."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from tandem.errors import StartupError
from tandem.graphs import BucketState, CapturedSteps, EagerDriver, Fallback, Step

BUCKETS = [8, 4, 2, 1]


class FakeDriver:
    """Captures by keeping the function; fails as told."""

    captures = True

    def __init__(self, capture: dict[int, Exception] | None = None, warm_up: dict[int, Exception] | None = None):
        """Exceptions by the number of the call, from 0."""
        self.capture_faults, self.warm_up_faults = capture or {}, warm_up or {}
        self.replay_fault: Exception | None = None
        self.captured = self.warmed_up = self.released = 0
        self.log: list[str] = []

    def warm_up(self, step: Step) -> None:
        self.log.append("warm up")
        self.warmed_up += 1
        if fault := self.warm_up_faults.get(self.warmed_up - 1):
            raise fault
        step()

    def capture(self, step: Step) -> Step:
        self.log.append("capture")
        self.captured += 1
        if fault := self.capture_faults.get(self.captured - 1):
            raise fault

        def replay() -> None:
            if self.replay_fault:
                raise self.replay_fault
            step()

        return replay

    def release(self) -> None:
        self.released += 1


class Steps:
    """A function per bucket that counts its runs."""

    def __init__(self, buckets: list[int]):
        self.runs = dict.fromkeys(buckets, 0)
        self.prepared: list[int] = []

    def all(self) -> Iterator[tuple[int, Step]]:
        for bucket in self.runs:
            self.prepared.append(bucket)
            yield bucket, self.of(bucket)

    def of(self, bucket: int) -> Callable[[], None]:
        def step() -> None:
            assert bucket in self.prepared
            self.runs[bucket] += 1

        return step


def states(captured: CapturedSteps[int]) -> dict[int, BucketState[int]]:
    return {state.bucket: state for state in captured}


def test_all_buckets_are_warmed_up_then_captured_in_the_given_order_and_replayed() -> None:
    driver, steps = FakeDriver(), Steps(BUCKETS)
    captured: CapturedSteps[int] = CapturedSteps(driver)
    captured.capture(steps.all())
    assert steps.prepared == BUCKETS
    assert driver.log == ["warm up", "capture"] * 4
    before = steps.runs[4]
    ran = captured.run(4, lambda: "read")
    assert (ran.result, ran.replayed, ran.fallback) == ("read", True, None)
    assert steps.runs[4] == before + 1
    assert [(s.bucket, s.captured, s.why, s.runs) for s in captured] == [
        (8, True, "", 0), (4, True, "", 1), (2, True, "", 0), (1, True, "", 0),
    ]  # fmt: skip
    assert states(captured)[4].seconds == pytest.approx(ran.seconds)


def test_a_capture_that_raises_leaves_its_bucket_eager_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    driver, steps = FakeDriver({1: RuntimeError("operation not permitted\nwhen stream is capturing")}), Steps(BUCKETS)
    captured: CapturedSteps[int] = CapturedSteps(driver)
    with caplog.at_level(logging.WARNING):
        captured.capture(steps.all())
        for _ in range(3):
            ran = captured.run(4, lambda: None)
            assert (ran.replayed, ran.fallback) == (False, Fallback.CAPTURE)
    assert len(caplog.records) == 1
    assert states(captured)[4] == BucketState(
        4,
        False,
        "capture: RuntimeError: operation not permitted when stream is capturing",
        3,
        states(captured)[4].seconds,
    )
    assert [s.captured for s in captured] == [True, False, True, True]
    assert driver.released == 0


def test_the_first_error_is_named_where_leaving_the_capture_raises_another() -> None:
    def raised() -> Exception:
        try:
            try:
                raise ValueError("the cause")
            finally:
                raise RuntimeError("capture invalidated")
        except RuntimeError as error:
            return error

    captured: CapturedSteps[int] = CapturedSteps(FakeDriver({0: raised()}))
    captured.capture(Steps([1]).all())
    assert states(captured)[1].why == "capture: ValueError: the cause"


@pytest.mark.parametrize("during", ["capture", "warm_up"])
def test_out_of_memory_drops_that_bucket_and_larger_ones_and_goes_on(during: str) -> None:
    driver, steps = FakeDriver(**{during: {2: torch.OutOfMemoryError("2 GiB")}}), Steps(BUCKETS)
    captured: CapturedSteps[int] = CapturedSteps(driver)
    captured.capture(steps.all())
    assert [s.captured for s in captured] == [False, False, False, True]
    assert driver.released == 1
    assert all("2 GiB" in s.why for s in captured if not s.captured)
    for bucket in BUCKETS:
        before = steps.runs[bucket]
        ran = captured.run(bucket, lambda: None)
        assert steps.runs[bucket] == before + 1
        assert ran.fallback is (None if bucket == 1 else Fallback.MEMORY)


def test_a_reason_stays_when_memory_runs_out_later() -> None:
    faults = {0: RuntimeError("a bad kernel"), 1: torch.OutOfMemoryError("full")}
    captured: CapturedSteps[int] = CapturedSteps(FakeDriver(faults))
    captured.capture(Steps(BUCKETS).all())
    assert states(captured)[8].why == "capture: RuntimeError: a bad kernel"
    assert states(captured)[4].why == "memory: OutOfMemoryError: full"


@pytest.mark.parametrize("fault", [RuntimeError("bad kernel"), torch.OutOfMemoryError("full")])
def test_without_eager_fallback_start_up_fails_with_bucket_and_reason(fault: Exception) -> None:
    captured: CapturedSteps[int] = CapturedSteps(FakeDriver({1: fault}), eager_fallback=False)
    with pytest.raises(StartupError, match=f"graphs: 4 is not captured.*{fault}"):
        captured.capture(Steps(BUCKETS).all())


def test_a_warm_up_that_fails_is_fatal_only_where_others_wait_in_it() -> None:
    alone: CapturedSteps[int] = CapturedSteps(FakeDriver(warm_up={1: RuntimeError("no kernel")}))
    alone.capture(Steps(BUCKETS).all())
    assert [s.captured for s in alone] == [True, False, True, True]
    together: CapturedSteps[int] = CapturedSteps(FakeDriver(warm_up={1: RuntimeError("no kernel")}), together=True)
    with pytest.raises(StartupError, match=r"4: a run before capture failed.*no kernel"):
        together.capture(Steps(BUCKETS).all())


@pytest.mark.parametrize("where", ["replay", "read"])
def test_a_failed_replay_is_done_over_eagerly_and_the_bucket_stays_eager(where: str) -> None:
    driver, steps = FakeDriver(), Steps(BUCKETS)
    captured: CapturedSteps[int] = CapturedSteps(driver, eager_fallback=False)
    captured.capture(steps.all())
    captured.run(2, lambda: None)
    reads = 0

    def read() -> str:
        nonlocal reads
        reads += 1
        if where == "read" and reads == 1:
            raise RuntimeError("illegal address")
        return "result"

    if where == "replay":
        driver.replay_fault = RuntimeError("illegal address")
    ran = captured.run(2, read)
    assert (ran.result, ran.replayed, ran.fallback) == ("result", False, Fallback.REPLAY)
    driver.replay_fault = None
    assert captured.run(2, read).fallback is Fallback.REPLAY
    state = states(captured)[2]
    assert (state.captured, state.why, state.runs) == (False, "replay: RuntimeError: illegal address", 2)


def test_on_a_device_without_graphs_the_steps_run_as_they_are() -> None:
    steps = Steps(BUCKETS)
    captured: CapturedSteps[int] = CapturedSteps(EagerDriver(), eager_fallback=False)
    captured.capture(steps.all())
    assert steps.runs == dict.fromkeys(BUCKETS, 0)
    ran = captured.run(8, lambda: steps.runs[8])
    assert (ran.result, ran.replayed, ran.fallback) == (1, False, None)
    assert states(captured)[8].why == "the device has no graphs"


def test_without_graphs_an_error_of_a_step_is_the_callers() -> None:
    captured: CapturedSteps[int] = CapturedSteps(EagerDriver())

    def fails() -> None:
        raise ValueError("in the step")

    captured.capture([(1, fails)])
    with pytest.raises(ValueError, match="in the step"):
        captured.run(1, lambda: None)
    assert not states(captured)[1].runs
