"""`tools.reduce_draft_head`: a reduced head for a draft model that was trained without one."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draft_training.conversations import SUFFIX, frequent_tokens, write_shard
from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from tests.fakes.draft_folders import HIDDEN, draft_config, draft_tensors, write_draft, write_target
from tests.unit.training.worlds import CPU, random_conversations
from tools.reduce_draft_head import main


def test_the_reduced_folder_proposes_the_frequent_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same network with the head's rows of the corpus' most frequent answer tokens, in a file others may read."""
    config = draft_config()
    target = write_target(tmp_path / "target")
    folder = write_draft(tmp_path / "draft", config, draft_tensors(config))
    before = load_file(folder / "model.safetensors")
    conversations = random_conversations(40, seed=1)
    write_shard(tmp_path / f"answers{SUFFIX}", conversations)
    whole = DraftModel.load(folder, target, torch.float32, CPU)
    monkeypatch.setattr(sys, "argv", ["", str(folder), str(tmp_path / f"answers{SUFFIX}"), "--tokens", "60"])
    main()
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == 60
    after = load_file(folder / "model.safetensors")
    tokens = frequent_tokens(conversations, 60)
    assert (after.pop("d2t") + torch.arange(60)).tolist() == tokens
    assert after.keys() == before.keys()
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode

    logits = []
    for model in (whole, DraftModel.load(folder, target, torch.float32, CPU)):
        kv = model.new_context()
        rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
        model.write_context([ContextRows(kv, 0, rows)])
        logits.append(model.block_logits([BlockRequest(kv, 5, 7, 7)]))
    torch.testing.assert_close(logits[1], logits[0][:, tokens], rtol=1e-4, atol=1e-4)
