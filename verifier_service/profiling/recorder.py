"""Watches the verifier's steps from outside: its functions are wrapped while it watches, and put back."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tandem.bench.step_profile import (
    ATTENTION,
    DRAFTING,
    ENGINE,
    LAYERS,
    LINEARS,
    RUNNER,
    SAMPLING,
    SCHEDULER,
)
from tandem.layers.fp8_linear import Fp8Linear
from tandem.layers.int4_linear import Int4Linear
from tandem.layers.linear import Linear
from verifier_service import model_runner, static_step
from verifier_service.drafting import Drafting
from verifier_service.model_runner import ModelRunner
from verifier_service.models.decoder import DecoderModel
from verifier_service.models.native_decoder import NativeDecoder
from verifier_service.models.target_model import ForwardBatch
from verifier_service.profiling.device_trace import DeviceTrace, with_device
from verifier_service.profiling.driver import Driver, Scenario
from verifier_service.profiling.ledger import Ledger
from verifier_service.scheduler import Scheduler
from verifier_service.step import Segment

_NATIVE_PARTS = {"linears": LINEARS, "head": LINEARS, "attention": ATTENTION}
"""What the native library counts of its own; the rest is the layers'."""
STAND_IN = "stand-in"
"""The profile's own clients and drafter: no part of a step."""


class Recorder:
    """Keeps what each step of the present scenario took, by part. A step lasts from its plan to the next one's."""

    def __init__(self, device: DeviceTrace | None):
        """device: where the target runs on a GPU."""
        self.steps: dict[Scenario, list[dict[str, float]]] = {}
        self._ledger = Ledger(ENGINE)
        self._device = device
        self._scenario: Scenario | None = None
        self._counts = False
        self._since: int | None = None
        """Steps of the scenario when the trace began; None: it does not run."""

    def begin(self, scenario: Scenario | None) -> None:
        """Steps from now on are this scenario's; None: nobody's."""
        self._end_trace()
        self._scenario, self._counts = scenario, False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, steps of any verifier in this process are recorded."""
        wrapped: list[tuple[Any, str, Any]] = []

        def wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
            original = getattr(owner, name)
            wrapped.append((owner, name, original))
            setattr(owner, name, wrapper(original))

        def charge(owner: Any, name: str, part: str) -> None:
            wrap(owner, name, lambda original: self._ledger.timed(part, original))

        for linear in (Linear, Int4Linear, Fp8Linear):
            for name in ("__call__", "added_to"):
                charge(linear, name, LINEARS)
        wrap(DecoderModel, "forward", self._forward)
        charge(DecoderModel, "logits", LAYERS)
        for name in ("forward", "forward_with_features", "logits"):
            wrap(NativeDecoder, name, self._native)
        for module, name in ((model_runner, "_decide"), (static_step, "argmax_rows"), (static_step, "walk_rows")):
            charge(module, name, SAMPLING)
        wrap(ModelRunner, "run", self._run)
        wrap(Scheduler, "plan", self._plan)
        charge(Drafting, "ask", DRAFTING)
        charge(Driver, "_draft", STAND_IN)
        charge(Driver, "_take", STAND_IN)
        try:
            yield
        finally:
            for owner, name, original in reversed(wrapped):
                setattr(owner, name, original)

    def _plan(self, original: Callable[..., Any]) -> Callable[..., Any]:
        inner = self._ledger.timed(SCHEDULER, original)

        def plan(scheduler: Scheduler, now: float) -> Any:
            step = self._ledger.take()
            if self._counts and self._scenario:
                step.pop(STAND_IN, None)
                self.steps.setdefault(self._scenario, []).append(step)
            self._counts = False
            return inner(scheduler, now)

        return plan

    def _run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        inner = self._ledger.timed(RUNNER, original)

        def run(runner: ModelRunner, segments: Sequence[Segment]) -> Any:
            self._counts = self._scenario is not None and self._scenario.is_of_kind(segments)
            self._ledger.timed(STAND_IN, self._begin_trace if self._counts else self._end_trace)()
            return inner(runner, segments)

        return run

    def _begin_trace(self) -> None:
        if self._device and self._scenario and self._since is None:
            self._since = len(self.steps.setdefault(self._scenario, []))
            self._device.start()

    def _end_trace(self) -> None:
        """Give the steps since the trace began the kernels' times."""
        if self._device and self._scenario and self._since is not None:
            kernels = self._device.stop()
            steps = self.steps[self._scenario]
            traced = steps[self._since :]
            mean = {part: seconds / max(1, len(traced)) for part, seconds in kernels.items()}
            steps[self._since :] = [with_device(step, mean) for step in traced]
            self._since = None

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        inner = self._ledger.timed(LAYERS, original)

        def forward(model: DecoderModel, batch: ForwardBatch, *rest: Any) -> Any:
            return inner(model, replace(batch, attention=self._ledger.timed(ATTENTION, batch.attention)), *rest)

        return forward

    def _native(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of a call that Python cannot look into: as the library itself counts."""

        def call(model: NativeDecoder, *arguments: Any) -> Any:
            before = model.seconds()
            result = original(model, *arguments)
            after = model.seconds()
            for name, part in _NATIVE_PARTS.items():
                self._ledger.move(after[name] - before[name], part)
            return result

        return self._ledger.timed(LAYERS, call)
