"""The capture guard passes what can be captured and fails on each fault that breaks a capture or its replays."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.fakes.capture_guard import Candidate, CaptureFault, check_capturable

CPU = torch.device("cpu")


class Toy:
    """Buffers x, index and y, and a step that `body` writes."""

    def __init__(self, body: "Callable[[Toy], torch.Tensor]"):
        self.x, self.y = torch.arange(6.0), torch.zeros(6)
        self.index = torch.tensor([3, 1, 4, 1, 5, 0])
        self.kept: list[torch.Tensor] = []
        self.once: float | None = None
        self.python_value = 2.0
        self._body = body

    def step(self) -> None:
        self.y.copy_(self._body(self))

    def change(self) -> None:
        """Other contents; and what a step must not read changes too."""
        self.x.mul_(-3).add_(1)
        self.index.copy_(self.index.flip(0).clone())
        self.python_value += 1


def check(body: Callable[[Toy], torch.Tensor]) -> None:
    made: list[Toy] = []

    def build() -> Candidate:
        made.append(Toy(body))
        # Whatever Python values are now, not what they were at the capture.
        made[-1].python_value = made[0].python_value
        return Candidate(made[-1].step, (made[-1].x, made[-1].index, made[-1].y))

    check_capturable(build, [lambda: made[0].change()] * 2)


def test_a_step_of_fixed_shape_passes() -> None:
    def body(t: Toy) -> torch.Tensor:
        scratch = torch.zeros(6, device=CPU)
        scratch.index_copy_(0, torch.arange(6, device=CPU), t.x.index_select(0, t.index) * 2)
        values, _ = scratch.sort()
        return torch.where(values > 1, values, t.x) + (t.x > 0).to(torch.float32)

    check(body)


def _python_branch(t: Toy) -> torch.Tensor:
    return t.x * 2 if t.x[0] > 0 else t.x * 3


def _mask_assignment(t: Toy) -> torch.Tensor:
    y = t.x.clone()
    y[t.x > 1] = y[t.x > 1]
    return y


def _keeps(t: Toy) -> torch.Tensor:
    t.kept = [t.x * 2]
    return t.kept[0]


def _keeps_more_and_more(t: Toy) -> torch.Tensor:
    t.kept.append(t.x * 2)
    return t.kept[-1]


def _read_at_first(t: Toy) -> torch.Tensor:
    if t.once is None:
        t.once = float(t.x[3])
    return t.x * t.once


def _rebinds_its_input(t: Toy) -> torch.Tensor:
    y = t.x + 1
    t.x = t.x.clone()
    return y


FAULTS: dict[str, Callable[[Toy], torch.Tensor]] = {
    "item": lambda t: t.x * t.x[2].item(),
    "float": lambda t: t.x * float(t.x[2]),
    "tolist": lambda t: t.x * sum(t.x.tolist()),
    "python branch on data": _python_branch,
    "nonzero": lambda t: t.x + len(t.x.nonzero()),
    "where with one argument": lambda t: t.x + len(torch.where(t.x > 1)[0]),
    "boolean indexing": lambda t: t.x + t.x[t.x > 1].sum(),
    "boolean assignment": _mask_assignment,
    "masked_select": lambda t: t.x + t.x.masked_select(t.x > 1).sum(),
    "cpu": lambda t: t.x.cpu() + 1,
    "to another device": lambda t: t.x.to("cpu") + 1,
    "numpy": lambda t: t.x + float(t.x.numpy().sum()),
    "tensor from a list": lambda t: t.x + torch.tensor([1.0], device=CPU),
    "tensor from device data": lambda t: t.x + torch.tensor([t.x[0]], device=CPU),
    "from numpy": lambda t: t.x + torch.from_numpy(np.ones(6)).to(CPU),
    "a factory without a device": lambda t: t.x + torch.arange(6),
    "unique": lambda t: t.x + len(t.index.unique()),
    "bincount": lambda t: t.x + t.index.bincount(minlength=6),
    "repeat_interleave by data": lambda t: t.x + t.x.repeat_interleave(t.index)[:6],
    "equal": lambda t: t.x * torch.equal(t.x, t.y),
    "keeps what it allocated": _keeps,
    "keeps more with each run": _keeps_more_and_more,
    "reads a python value": lambda t: t.x * t.python_value,
    "reads data at the first run only": _read_at_first,
    "rebinds a buffer": _rebinds_its_input,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    with pytest.raises(CaptureFault):
        check(FAULTS[fault])
