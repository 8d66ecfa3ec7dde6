"""The draft step captured on a GPU against the model with contexts in one piece on the CPU, float32."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.draft_network import DraftNetwork
from drafter_service.metrics import DrafterMetrics
from drafter_service.paged_draft_model import PagedDraftModel
from tandem.speculation import DraftShape
from tests.fakes.draft_folders import (
    HIDDEN,
    VOCAB,
    dflash2_config,
    draft_config,
    draft_tensors,
    write_draft,
    write_target,
)

SLIDING = {"sliding_window": 20, "use_sliding_window": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "full": draft_config(),
    "sliding and causal": draft_config(
        **SLIDING, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "DFlash2": dflash2_config(),
}


def load(folder: Path, config: dict[str, Any], device: torch.device) -> tuple[DraftModel, PagedDraftModel]:
    draft = write_draft(folder / "draft", config, draft_tensors(config))
    target = write_target(folder / "target")
    network = DraftNetwork.load(draft, target, torch.float32, device)
    whole = DraftModel.load(draft, target, torch.float32, torch.device("cpu"))
    return whole, PagedDraftModel(network, DrafterMetrics(CollectorRegistry()), 64, 16)


@pytest.mark.parametrize("name", CONFIGS)
def test_captured_steps_draft_what_the_model_drafts(name: str, tmp_path: Path, device: torch.device) -> None:
    """Every bucket is captured, and replays of them, in any order and with fewer requests than they hold, draft the
    same tokens."""
    whole, paged = load(tmp_path, CONFIGS[name], device)
    assert [state.why for state in paged.buckets if not state.captured] == []
    generator = random.Random(name)
    contexts = []
    for length in (1, 15, 16, 17, 40, 63, 70):
        features = torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(length))
        a, b = whole.new_context(), paged.new_context()
        assert paged.reserve(b, length)
        whole.write_context([ContextRows(a, 0, features)])
        paged.write_context([ContextRows(b, 0, features)])
        contexts.append((a, b, length))
    for size in (1, 3, 7, 2, 1, 5):
        ours, expected = [], []
        for a, b, base in generator.sample(contexts, size):
            shape, nodes = generator.choice(list(DraftShape)), generator.randint(1, 8)
            anchor = generator.randrange(VOCAB)
            expected.append(BlockRequest(a, base, anchor, nodes, shape))
            ours.append(BlockRequest(b, base, anchor, nodes, shape))
        for draft, other in zip(paged.draft(ours), whole.draft(expected), strict=True):
            assert (draft.tokens, draft.parents) == (other.tokens, other.parents)
            assert draft.log_probs == pytest.approx(other.log_probs, abs=1e-3)
    assert all(state.captured for state in paged.buckets)


def test_contexts_are_written_without_waiting(tmp_path: Path, device: torch.device) -> None:
    """Nothing of it waits for the device, so that it overlaps with what the host does next."""
    _, paged = load(tmp_path, draft_config(), device)
    kv = paged.new_context()
    assert paged.reserve(kv, 40)
    features = torch.randn(40, HIDDEN)
    paged.write_context([ContextRows(kv, 0, features)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        paged.write_context([ContextRows(kv, 0, features)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
