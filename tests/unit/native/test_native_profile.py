"""A profile sees into the native path: what the library counts of its own is charged to those parts."""

from pathlib import Path

import pytest
import torch

from tandem.bench.step_profile import ATTENTION, LAYERS, LINEARS
from tests.fakes.random_targets import random_architecture
from tests.unit.native.runners import native_model, round_weights
from tests.unit.native.test_native_logits import BLOCKS, features_of
from tests.unit.verifier.steps import CPU
from verifier_service.profiling.recorder import Recorder
from verifier_service.step import SegmentRows
from verifier_service.step_executor import StepExecutor


@pytest.mark.parametrize("taps", [(), (1,), (0, 1)], ids=str)
def test_a_step_is_charged_as_the_library_counts_whether_it_makes_features_or_not(
    tmp_path: Path, taps: tuple[int, ...]
) -> None:
    """A call that is not watched would be the model runner's time, and the products none."""
    random_architecture(tmp_path, "qwen3")
    round_weights(tmp_path)
    model, recorder = native_model(tmp_path, threads=1), Recorder(None)
    executor = StepExecutor(model, 20, 16, CPU)
    features = features_of(model, taps) if taps else None
    with recorder.watching(), torch.inference_mode():
        before = model.seconds()
        computed = executor.forward([SegmentRows(0, 0, list(range(40)), [], BLOCKS)], features)
        executor.logits(computed.hidden, [39])
        spent = {name: after - before[name] for name, after in model.seconds().items()}
        charged = recorder._ledger.take()
    assert spent["head"] > 0
    assert charged[LINEARS] == pytest.approx(spent["linears"] + spent["head"])
    assert charged[ATTENTION] == pytest.approx(spent["attention"])
    assert charged[LAYERS] >= spent["other"] * 0.99
