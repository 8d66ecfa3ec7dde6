"""Time is charged once, to the part that spent it."""

import pytest

from verifier_service.profiling.ledger import Ledger


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_each_part_is_charged_its_own_time_and_not_that_of_what_it_calls() -> None:
    clock = Clock()
    ledger = Ledger("loop", clock)
    inner = ledger.timed("linears", lambda: clock.pass_by(3.0))

    def layers() -> None:
        clock.pass_by(1.0)
        inner()
        inner()
        clock.pass_by(0.5)

    clock.pass_by(10.0)
    ledger.timed("layers", layers)()
    clock.pass_by(20.0)
    assert ledger.take() == {"loop": 30.0, "layers": 1.5, "linears": 6.0}
    assert sum(ledger.take().values()) == 0.0


def test_a_part_that_raises_is_left_and_its_time_kept() -> None:
    clock = Clock()
    ledger = Ledger("loop", clock)

    def failing() -> None:
        clock.pass_by(2.0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        ledger.timed("layers", failing)()
    clock.pass_by(1.0)
    assert ledger.take() == {"loop": 1.0, "layers": 2.0}


def test_what_a_library_measured_itself_is_taken_from_the_part_it_is_called_in() -> None:
    clock = Clock()
    ledger = Ledger("loop", clock)

    def call() -> None:
        clock.pass_by(5.0)
        ledger.move(4.0, "linears")

    ledger.timed("layers", call)()
    assert ledger.take() == {"loop": 0.0, "layers": 1.0, "linears": 4.0}
