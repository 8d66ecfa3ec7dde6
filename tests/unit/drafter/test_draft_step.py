"""The draft step can be captured: what it does is decided by its buffers alone."""

import random
from pathlib import Path

import pytest
import torch

from drafter_service.context_blocks import PagedContext
from drafter_service.draft_inputs import DraftInputs, InputShape
from drafter_service.draft_model import BlockRequest
from drafter_service.draft_network import DraftNetwork
from drafter_service.draft_step import DraftBucket, DraftStep, StepBuffers
from tandem.checkpoints.draft_config import DraftConfig
from tandem.kernels.paged_attention import paged_attention
from tandem.kernels.triton.paged_attention import launch_paged_attention
from tests.fakes.capture_guard import Candidate, check_capturable
from tests.fakes.draft_folders import VOCAB, dflash2_config, draft_config, draft_tensors, write_draft, write_target

SLIDING = {"sliding_window": 20, "use_sliding_window": True}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "full": draft_config(),
    "sliding and causal": draft_config(**SLIDING, layer_types=MIXED, attention_bias=True),
    "DFlash2": dflash2_config(),
}
BLOCKS, BLOCK_TOKENS = 24, 16


@pytest.mark.parametrize(("requests", "candidates"), [(1, 1), (4, 1), (4, 20)])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_step_passes_the_capture_guard(
    name: str, requests: int, candidates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all its requests and with fewer, at other bases, over other contexts."""
    # As on a GPU; packed weights have no storage to look at.
    monkeypatch.setattr("tandem.layers.linear._can_pack", lambda weight: False)
    config = CONFIGS[name]
    folder = write_draft(tmp_path / "draft", config, draft_tensors(config))
    network = DraftNetwork.load(folder, write_target(tmp_path / "target"), torch.float32, torch.device("cpu"))
    if network.config.dflash2:
        candidates = network.config.dflash2.selector_top_k
    bucket = DraftBucket(requests, candidates)
    built: list[tuple[StepBuffers, DraftStep]] = []

    def build() -> Candidate:
        buffers = StepBuffers.allocate(network, BLOCKS, BLOCK_TOKENS, [bucket])
        step = DraftStep(network, buffers, bucket)
        built.append((buffers, step))
        return Candidate(step.run, [buffers.kv, buffers.inputs, buffers.outputs])

    def change(seed: int) -> None:
        buffers, step = built[0]
        generator = random.Random(seed)
        buffers.kv.normal_(generator=torch.Generator().manual_seed(seed))
        blocks = generator.sample(range(1, BLOCKS), 5 * requests)
        step.write(
            [
                BlockRequest(
                    PagedContext(blocks[5 * i : 5 * i + 5]), generator.randrange(70), generator.randrange(VOCAB), 7
                )
                for i in range(generator.randint(1, requests))
            ]
        )

    check_capturable(build, [lambda seed=seed: change(seed) for seed in range(4)])


def test_kernel_reads_windows_as_the_reference_does(tmp_path: Path) -> None:
    """The Triton kernel, interpreted: windows are bits without a prefix, on tables that begin where the window does."""
    raw = draft_config(**SLIDING, layer_types=MIXED)
    config = DraftConfig.load(write_draft(tmp_path, raw, draft_tensors(raw)))
    shape = InputShape.of(config, 3, BLOCKS, BLOCK_TOKENS)
    inputs = DraftInputs.over(torch.zeros(shape.size, dtype=torch.int32), shape)
    blocks = list(range(1, 13))
    requests = [BlockRequest(PagedContext(blocks[6 * i : 6 * i + 6]), base, 1, 7) for i, base in enumerate((3, 57))]
    inputs.write(requests, config.mask_token_id, BLOCK_TOKENS)
    kv = torch.randn(BLOCKS, BLOCK_TOKENS, 2, config.num_key_value_heads, config.head_dim)
    q = torch.randn(3 * config.block_size, config.num_attention_heads, config.head_dim)
    assert {layer.window for layer in inputs.tables} == {20, None}
    for tables in inputs.tables.values():
        expected = paged_attention(q, kv, tables, 0.2, config.head_dim)
        torch.testing.assert_close(
            launch_paged_attention(q, kv, tables, 0.2, config.head_dim), expected, rtol=1e-4, atol=1e-4
        )
        assert expected[: 2 * config.block_size].abs().amax(dim=1).min() > 0
        assert not expected[2 * config.block_size :].any()
