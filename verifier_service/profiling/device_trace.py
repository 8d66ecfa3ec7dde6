"""What a GPU's kernels took, by part, from torch's profiler: it sees them in captured steps too."""

import re
from collections.abc import Iterable
from typing import Any

import torch

from tandem.bench.step_profile import ATTENTION, DRAFTING, ENGINE, LAYERS, LINEARS, RUNNER, SAMPLING, SCHEDULER

OURS = {
    "attend": ATTENTION,
    "merge": ATTENTION,
    "_sort": LINEARS,
    "_product": LINEARS,
    "_add_up": LINEARS,
    "_walk": SAMPLING,
    "_choose": SAMPLING,
    "_pieces": SAMPLING,
    "_move": RUNNER,
}
"""Tandem's own kernels, tandem/kernels/triton; those that are not named are the layers'."""

_LIBRARIES = (
    (ATTENTION, r"flash|fmha"),
    (LINEARS, r"gemm|gemv|nvjet|cutlass|cublas|wgmma|split_?k"),
    (SAMPLING, r"argmax|argmin"),
    (RUNNER, r"^mem(cpy|set)"),
)
"""By what their names hold, the first that fits."""

_HOST = (SCHEDULER, DRAFTING, ENGINE)
"""Parts during which the device has nothing to do: the engine waits for each step."""


def part_of(kernel: str) -> str:
    """The part a kernel belongs to."""
    if kernel in OURS:
        return OURS[kernel]
    return next((part for part, pattern in _LIBRARIES if re.search(pattern, kernel, re.IGNORECASE)), LAYERS)


class DeviceTrace:
    """Kernel times between start() and stop()."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def start(self) -> None:
        # Not the CPU's operations: recording those would slow the host down.
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()

    def stop(self) -> dict[str, float]:
        """Seconds by part."""
        self._profiler.stop()
        events = self._profiler.events()
        kernels = (e for e in events if e.device_type.name == "CUDA")
        return by_part((kernel.name, kernel.self_device_time_total / 1e6) for kernel in kernels)


def by_part(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """kernels: name and seconds of each."""
    seconds: dict[str, float] = {}
    for name, taken in kernels:
        part = part_of(name)
        seconds[part] = seconds.get(part, 0.0) + taken
    return seconds


def with_device(step: dict[str, float], kernels: dict[str, float]) -> dict[str, float]:
    """A step by the host's clock, in which the parts that run on the device take as long as their kernels, and the
    runner what is left: launches, copies, waiting."""
    whole = sum(step.values())
    parts = {part: step.get(part, 0.0) for part in _HOST}
    parts |= {part: kernels.get(part, 0.0) for part in (LINEARS, ATTENTION, LAYERS, SAMPLING)}
    return parts | {RUNNER: whole - sum(parts.values())}
