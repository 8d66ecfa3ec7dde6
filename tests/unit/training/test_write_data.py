"""The data of a run: seeds, what writers add, what is left out, and taking a run up."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from draft_training.conversations import (
    SUFFIX,
    Conversation,
    read_folder,
    read_shard,
    shard_files,
    write_shard,
)
from draft_training.prefill import TapComputer
from draft_training.prompts import prompts_from_files
from draft_training.slot_decoder import SlotDecoder
from draft_training.taps import SUFFIX as TAPS_SUFFIX
from draft_training.taps import TapFile, TapShape
from draft_training.target import load_target as load_run_target
from draft_training.write_data import DataWriter, import_seed_shards
from gateway.chat_template import Turn
from gateway.tokenizer import TargetTokenizer
from tandem.errors import StartupError
from tests.fakes.tiny_models import HIDDEN
from tests.unit.native.runners import round_weights
from tests.unit.training.worlds import (
    CPU,
    World,
    chatting_target,
    cycling_target,
    load_run,
    load_run_beside,
    load_target,
    never,
    prompt_lines,
    random_conversations,
    read,
    write_run,
)
from verifier_service.models.native_decoder import NativeDecoder


def test_duplicates_and_held_out_prompts_are_dropped(world: World, tmp_path: Path) -> None:
    """No prompt is in the data twice, and none of the held-out ones: neither when it is answered nor from seeds."""
    target, _ = world
    tokenizer = TargetTokenizer.load(target)
    held_out = tokenizer.encode_chat([Turn("user", "hello")])
    seeds = random_conversations(20, seed=1)
    held_out_seed = Conversation([*held_out, 8, 9, 10, 11, 12], len(held_out), True, "")
    too_short = Conversation([5, 6, 7], 2, True, "")
    seeds += [seeds[3], held_out_seed, too_short]
    write_shard(tmp_path / f"old{SUFFIX}", seeds)
    chat = json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n"
    (tmp_path / "prompts.jsonl").write_text(prompt_lines(["one", "two", "one", "three"]) + chat)
    config = load_run_beside(
        target,
        tmp_path,
        {"prompts": ["prompts.jsonl"], "seed_shards": [f"old{SUFFIX}"], "answer_tokens": 10**6, "min_answer_tokens": 2},
    )
    import_seed_shards(config)
    data = config.run / "data"
    imported = [c for _, shard in read_folder(data) for c in shard]
    assert imported == [c for c in seeds[:20] if c.answer_tokens >= 2]
    writer = DataWriter(config, 0)
    writer.complete_taps(never)
    writer.write(never)
    written = [c for c, _ in read(data)]
    prompts = [tuple(c.ids[: c.answer_start]) for c in written]
    assert len(set(prompts)) == len(prompts)
    assert tuple(held_out) not in prompts
    assert set(prompts) - {tuple(c.ids[: c.answer_start]) for c in imported} <= {
        tuple(tokenizer.encode(text)) for text in ("one", "two", "three")
    }


def test_an_import_that_was_cut_off_is_done_again(world: World, tmp_path: Path) -> None:
    """Seeds are there once and whole, however often and wherever a run was stopped."""
    target, _ = world
    seeds = random_conversations(30, seed=1)
    write_shard(tmp_path / f"old{SUFFIX}", seeds)
    config = load_run_beside(target, tmp_path, {"seed_shards": [f"old{SUFFIX}"], "min_answer_tokens": 2})
    import_seed_shards(config)
    files = shard_files(config.run / "data")
    assert len(files) == 4
    files[0].unlink()
    import_seed_shards(config)
    stamps = [path.stat().st_mtime_ns for path in shard_files(config.run / "data")]
    import_seed_shards(config)
    assert [path.stat().st_mtime_ns for path in shard_files(config.run / "data")] == stamps
    assert [c for _, shard in read_folder(config.run / "data") for c in shard] == seeds


def test_missing_hidden_states_are_computed(world: World, tmp_path: Path) -> None:
    """Every shard is some writer's to complete, and what it computes later is what was kept while writing."""
    target, _ = world
    config = load_run_beside(target, tmp_path, {"writers": 2, "answer_tokens": 900})
    data = config.run / "data"
    DataWriter(config, 0).write(never)
    before = read(data)
    assert len(shard_files(data)) > 2
    for path in data.glob(f"*{TAPS_SUFFIX}"):
        path.unlink()
    for number in (0, 1):
        DataWriter(config, number).complete_taps(never)
        assert len(list(data.glob(f"*{TAPS_SUFFIX}"))) < len(shard_files(data)) or number == 1
    for (conversation, rows), (kept, kept_rows) in zip(read(data), before, strict=True):
        assert conversation == kept
        torch.testing.assert_close(rows.float(), kept_rows.float(), rtol=2**-7, atol=1e-4)


def test_a_run_taken_up_goes_on(world: World, tmp_path: Path) -> None:
    """Writing again adds what is missing and nothing that is there; prompts of files are not answered twice; with
    enough data, nothing is written."""
    target, _ = world
    config = load_run_beside(target, tmp_path, {"answer_tokens": 200})
    DataWriter(config, 0).write(never)
    first = [c for c, _ in read(config.run / "data")]
    assert sum(c.answer_tokens for c in first) >= 200
    more = load_run_beside(target, tmp_path, {"answer_tokens": 500})
    DataWriter(more, 0).write(never)
    second = [c for c, _ in read(config.run / "data")]
    assert second[: len(first)] == first
    assert sum(c.answer_tokens for c in second) >= 500
    assert len({tuple(c.ids[: c.answer_start]) for c in second}) == len(second)
    stamps = [path.name for path in shard_files(config.run / "data")]
    DataWriter(more, 0).write(never)
    assert [path.name for path in shard_files(config.run / "data")] == stamps


def test_prompts_of_files_are_answered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is taken up does not decode again what it has: the target is not even asked."""
    cycling_target(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text(prompt_lines([f"number {i}" for i in range(10)], kind="n"))
    config = load_run(tmp_path, data={"prompts": ["prompts.jsonl"], "answer_tokens": 10**6, "kinds": None})
    DataWriter(config, 0).write(never)
    written = read(config.run / "data")
    assert {c.kind for c, _ in written} == {"n"}
    assert len({tuple(c.ids[: c.answer_start]) for c, _ in written}) == 10
    monkeypatch.setattr(SlotDecoder, "step", lambda *_: pytest.fail("decoded an answer that is there"))
    DataWriter(config, 0).write(never)


@torch.inference_mode()
def test_the_native_path_writes_what_the_target_says(tmp_path: Path) -> None:
    """At temperature 0 every token is the largest of fp32 arithmetic on the same weights, or as good as that; hidden
    states are those of `data.target`, and are not the other folder's."""
    cycling_target(tmp_path / "target")
    writing = chatting_target(tmp_path / "writing", num_hidden_layers=2)
    round_weights(tmp_path / "writing")
    (tmp_path / "prompts.jsonl").write_text(prompt_lines([f"Question {i}: why is {'x' * i} " for i in range(12)]))
    data = {"target": "writing", "prompts": ["prompts.jsonl"], "greedy_share": 1, "min_answer_tokens": 2}
    config = load_run(tmp_path, data=data, dtype="bfloat16", cpu_kernels="native")
    DataWriter(config, 0).write(never)
    written = read(config.run / "data")
    assert len(written) > 6
    oracle = load_target(tmp_path / "writing")
    writing.load_state_dict({name: tensor.bfloat16().float() for name, tensor in writing.state_dict().items()})
    expected_rows = TapComputer(oracle, (0, 1), CPU).rows([c.ids[:-1] for c, _ in written])
    for (conversation, rows), expected in zip(written, expected_rows, strict=True):
        assert ((rows - expected).norm(dim=1) <= 0.02 * expected.norm(dim=1)).all()
        logits = writing(torch.tensor([conversation.ids[:-1]])).logits[0, conversation.answer_start - 1 :]
        chosen = logits.gather(1, torch.tensor(conversation.ids[conversation.answer_start :])[:, None])[:, 0]
        assert (logits.amax(dim=1) - chosen <= 0.02 * logits.norm(dim=1)).all()


@pytest.mark.parametrize(
    ("changes", "native"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16", "cpu_kernels": "torch"}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_the_native_path_is_taken_where_it_is_possible(
    changes: dict[str, str], native: bool, world: World, tmp_path: Path
) -> None:
    """And torch where the configuration says so, or the dtype is not the native path's."""
    config = load_run_beside(world[0], tmp_path, {}, **changes)
    assert isinstance(load_run_target(config, CPU), NativeDecoder) is native


def test_a_native_path_that_is_not_possible_is_refused(world: World, tmp_path: Path) -> None:
    """With the key and the reason."""
    config = load_run_beside(world[0], tmp_path, {}, cpu_kernels="native")
    with pytest.raises(StartupError, match=r"^cpu_kernels: native is not possible here: its dtype is not bfloat16"):
        DataWriter(config, 0)


def test_writers_share_the_prompts_of_files(world: World, tmp_path: Path) -> None:
    """Each prompt is exactly one writer's."""
    target, _ = world
    (tmp_path / "prompts.jsonl").write_text(prompt_lines([f"number {i}" for i in range(31)]))
    config = load_run_beside(target, tmp_path, {"prompts": ["prompts.jsonl"], "writers": 3})
    tokenizer = TargetTokenizer.load(target)
    shares = [[p.ids for p in prompts_from_files(config.data, tokenizer, i)] for i in range(3)]
    assert all(len(share) > 5 for share in shares)
    assert sorted(ids for share in shares for ids in share) == sorted(
        tokenizer.encode(f"number {i}") for i in range(31)
    )


def test_hidden_states_of_other_taps_are_refused(world: World, tmp_path: Path) -> None:
    """Rows of another width are an error that names the file, never read as something else."""
    target, _ = world
    config = load_run_beside(target, tmp_path, {"answer_tokens": 60})
    DataWriter(config, 0).write(never)
    path = shard_files(config.run / "data")[0]
    taps = path.with_name(path.name.removesuffix(SUFFIX) + TAPS_SUFFIX)
    with pytest.raises(StartupError, match=rf"{taps.name}.*target_layer_ids"):
        TapFile(taps, read_shard(path), TapShape(3, HIDDEN))


def test_sigterm_completes_the_shard_begun(tmp_path: Path) -> None:
    """The writer process ends in good order, with exit code 0, and what it finished can be trained on."""
    chatting_target(tmp_path / "target")
    file = write_run(tmp_path, data={"answer_tokens": 10**7, "shard_conversations": 10**5})
    command = [sys.executable, "-m", "draft_training.write_data", "--config", str(file), "--writer", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 200
        unfinished = tmp_path / "run" / "data" / f"w0-00000{TAPS_SUFFIX}.part"
        while not (unfinished.is_file() and unfinished.stat().st_size) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, process.stderr and process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    assert len(read(tmp_path / "run" / "data")) > 0
    assert not list((tmp_path / "run" / "data").glob("*.part"))
