"""What steps read, and how long requests wait for the first one, is counted as it is."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry

from tandem.checkpoints.folder import CheckpointFolder
from tandem.config import load_config
from tandem.sampling import SamplingParams
from tests.fakes.random_targets import random_architecture
from verifier_service.app import _step_bytes, build
from verifier_service.models.loading import load_model
from verifier_service.sequence import SequenceRequest
from verifier_service.step_bytes import StepBytes

_KV_TOKEN = {"qwen3": 2 * 2 * 2 * 32 * 4, "qwen3-moe": 3 * 2 * 2 * 32 * 4, "deepseek-v3": 3 * (32 + 64) * 4}
"""Layers, key and value, heads, dimensions, fp32; the latent and the rotated part."""
_NOT_READ_WHOLE = re.compile(r"embed_tokens|norm|\.experts\.|e_score_correction_bias")


@pytest.mark.parametrize("kind", _KV_TOKEN)
def test_sizes_are_those_of_the_checkpoint(tmp_path: Path, kind: str) -> None:
    """All weights that products read, but routed experts: counted from the oracle's parameters."""
    oracle = random_architecture(tmp_path, kind)
    wanted = sum(p.nbytes for name, p in oracle.named_parameters() if not _NOT_READ_WHOLE.search(name))
    part: Any = SimpleNamespace(model=load_model(CheckpointFolder(tmp_path), torch.float32, torch.device("cpu")))
    assert _step_bytes(part, 1) == StepBytes(wanted, _KV_TOKEN[kind])


@pytest.mark.parametrize(("split", "heads"), [(False, 1), (True, 4)])
def test_ranks_read_what_they_do_not_split(split: bool, heads: int) -> None:
    """Rank 0's part stands for all; a head that is not split is rank 0's alone."""
    model = SimpleNamespace(
        layer_bytes=1000,
        head_bytes=100,
        head_is_split=split,
        layers=2,
        dtype=torch.bfloat16,
        kv_shape=lambda blocks, tokens: (blocks, tokens, 1, 1, 8),
    )
    part: Any = SimpleNamespace(model=model)
    assert _step_bytes(part, 4) == StepBytes(4 * 1000 + heads * 100, 4 * 2 * 8 * 2)


def test_a_served_answer_is_counted(tmp_path: Path) -> None:
    """A prompt of 20 tokens and 4 more: one step reads 20 tokens' KV, the next 21, and each the weights once. What
    warmed the model up is not counted."""
    random_architecture(tmp_path / "target", "qwen3", eos_token_id=None)
    path = tmp_path / "stack.yaml"
    verifier = {"dtype": "float32", "kv_blocks": 20, "kv_block_tokens": 8, "threads": 1}
    path.write_text(yaml.safe_dump({"target": str(tmp_path / "target"), "verifier": verifier}))
    registry = CollectorRegistry()
    engine, _, _ = build(load_config(path), registry)
    ended = threading.Event()
    request = SequenceRequest("r", list(range(20)), 20, SamplingParams(temperature=0.0), 4)
    engine.submit(request, lambda emission: ended.set() if emission.finish_reason else None)
    thread = threading.Thread(target=engine.run)
    thread.start()
    assert ended.wait(30)
    engine.stop()
    thread.join(30)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tandem_{name}", labels)

    weights = value("target_bytes_read_total", kind="prefill", what="weights")
    assert weights
    assert value("target_bytes_read_total", kind="decode", what="weights") == 3 * weights
    kv = value("target_bytes_read_total", kind="prefill", what="kv")
    assert kv == 20 * _KV_TOKEN["qwen3"]
    assert value("target_bytes_read_total", kind="decode", what="kv") == (21 + 22 + 23) * _KV_TOKEN["qwen3"]
    assert value("request_queue_time_seconds_count") == 1
    assert value("request_queue_time_seconds_bucket", le="40.96") == 1
