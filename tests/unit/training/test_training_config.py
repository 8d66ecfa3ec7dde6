"""Errors of a training run's file, before anything is written: each names its key."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from draft_training import run
from draft_training.config import TrainConfig
from draft_training.prompts import read_prompts
from gateway.tokenizer import TargetTokenizer
from tandem.errors import StartupError
from tests.fakes.tiny_models import random_target
from tests.unit.training.worlds import chatting_target, load_run, write_run

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"training": {"lr": 1}}, "training.lr: unknown key"),
    "wrong type": ({"training": {"steps": "many"}}, "training.steps: "),
    "zero": ({"data": {"answer_tokens": 0}}, "data.answer_tokens: "),
    "blocks of one": ({"training": {"blocks": [4, 1]}}, "training.blocks.1: "),
    "a block of one": ({"draft": {"block_size": 1}}, "draft.block_size: "),
    "no taps": ({"draft": {"target_layer_ids": []}}, "draft.target_layer_ids: "),
    "missing": ({"draft": {"mask_token_id": None}}, "draft.mask_token_id: Field required"),
    "missing file": ({"data": {"held_out_prompts": "nowhere.jsonl"}}, "data.held_out_prompts: Value error, no file"),
    "missing folder": ({"target": "nowhere"}, "target: Value error, no config.json"),
    "no source of data": ({"data": {"kinds": None}}, "data: Value error, needs one of kinds, prompts, seed_shards"),
    "share": ({"data": {"kinds": {"chat": {"share": 0}}}}, "data.kinds.chat.share: "),
    "no openings": ({"data": {"kinds": {"chat": {"share": 1, "openings": []}}}}, "data.kinds.chat.openings: "),
    "dflash2": ({"draft": {"dflash2": {"rank": 3}}}, "draft.dflash2.rank: unknown key"),
    "device": ({"device": "tpu"}, "device: "),
    "kernels": ({"cpu_kernels": "fast"}, "cpu_kernels: "),
    "missing folder to write with": ({"data": {"target": "nowhere"}}, "data.target: Value error, no config.json"),
}
UNSUITABLE: dict[str, tuple[dict[str, Any], str]] = {
    "taps": ({"draft": {"target_layer_ids": [0, 3]}}, "draft.target_layer_ids: must be at most 2 .*is 3"),
    "negative tap": ({"draft": {"target_layer_ids": [-1, 2]}}, "draft.target_layer_ids: must be distinct"),
    "twice the same tap": ({"draft": {"target_layer_ids": [1, 1]}}, "draft.target_layer_ids: must be distinct"),
    "mask token": ({"draft": {"mask_token_id": 512}}, "draft.mask_token_id: must be at most 511"),
    "blocks": ({"training": {"blocks": [4, 99]}}, "training.blocks: must be at most draft.block_size, .*one is 99"),
    "head": ({"draft": {"draft_vocab_size": 513}}, "draft.draft_vocab_size: must be at most 512"),
    "fewer words": ({"data": {"target": "few_words"}}, "data.target: .*few_words has vocab_size 496, target has 512"),
    "narrower": ({"data": {"target": "narrow"}}, "data.target: .*narrow has hidden_size 64, target has 128"),
    "flatter": ({"data": {"target": "flat"}}, "data.target: .*flat has layers 2, target has 3"),
    "length": ({"data": {"max_answer_tokens": 1000}}, "max_answer_tokens: must be at most 1024 .*is 1048"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("configs")
    chatting_target(path / "target")
    random_target(path / "few_words", vocab_size=496)
    random_target(path / "narrow", hidden_size=64)
    random_target(path / "flat", num_hidden_layers=2)
    return path


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_key(case: str, folder: Path) -> None:
    """One line with file and key."""
    changes, message = WRONG[case]
    with pytest.raises(StartupError) as caught:
        load_run(folder, **changes)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"config {folder / 'train.yaml'}: {message}"), line


@pytest.mark.parametrize("case", UNSUITABLE)
def test_what_the_target_does_not_allow_names_the_key(case: str, folder: Path) -> None:
    """Found before the target is loaded or a token is written."""
    changes, message = UNSUITABLE[case]
    with pytest.raises(StartupError, match=message):
        run.check(load_run(folder, **changes))


def test_a_good_file_is_read(folder: Path) -> None:
    """Paths are relative to the file."""
    config = load_run(folder)
    run.check(config)
    assert config.run == folder / "run"
    assert config.data.held_out_prompts == folder / "held_out.jsonl"


def test_the_shipped_configuration_is_valid(folder: Path) -> None:
    """configs/train-demo.yaml has known keys of the right types only, whether or not the demo target is prepared."""
    file = Path(__file__).parents[3] / "configs" / "train-demo.yaml"
    whole = yaml.safe_load(file.read_text())
    config = TrainConfig.model_validate({**whole, "target": str(folder / "target")}, context={"base": file.parent})
    assert set(config.data.kinds) == {"chat", "code", "maths"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "needs messages or a prompt"),
        ('{"kind": "chat"}', "needs messages or a prompt"),
        ("[1]", "needs messages or a prompt"),
        ('{"messages": [{"role": "user"}]}', "needs messages or a prompt"),
        ('{"prompt": 3}', "needs messages or a prompt"),
    ],
)
def test_a_bad_prompt_names_file_and_line(line: str, reason: str, folder: Path, tmp_path: Path) -> None:
    """Whatever is wrong with it."""
    write_run(folder)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(StartupError, match=rf"prompts.jsonl: line 3: {reason}"):
        list(read_prompts(tmp_path / "prompts.jsonl", TargetTokenizer.load(folder / "target")))
