"""`tandem draft-train` and `tandem draft-eval` as a user runs them, on tiny targets."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from tandem.cli.main import app
from tests.unit.training.worlds import CPU, chatting_target, cycling_target, write_run

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}


def tandem(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tandem.cli.main", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def learnable_run(folder: Path, **training: Any) -> Path:
    """A target that counts in circles, and prompts for it to answer."""
    cycling_target(folder / "target")
    texts = [a + b for a in "abcdefgh" for b in "ijklmnopq"]
    lines = [{"kind": "n", "messages": [{"role": "user", "content": text}]} for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return write_run(
        folder,
        data={"kinds": None, "prompts": ["prompts.jsonl"], "answer_tokens": 10**5, "slots": 36},
        draft={"num_hidden_layers": 1, "intermediate_size": 64, "draft_vocab_size": 400},
        training={
            "steps": 150, "batch_conversations": 8, "accumulation": 1, "anchors": 12, "learning_rate": 4e-3,
            "evaluate_minutes": 100, **training,
        },
    )  # fmt: skip


@pytest.mark.slow
def test_a_draft_model_from_nothing(tmp_path: Path) -> None:
    """One command writes data, trains, exports a folder that the drafter loads, and a card; the draft model has
    learned; run again it does nothing twice; draft-eval measures the same figures from the folder."""
    file = learnable_run(tmp_path)
    process = start("draft-train", "--config", file)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "data: 72 conversations, 1,728 answer tokens" in out
    assert "exported to" in out
    assert "150 steps in all" in out
    curve = [json.loads(line) for line in (tmp_path / "run" / "progress.jsonl").read_text().splitlines()]
    assert (curve[0]["step"], curve[-1]["step"]) == (0, 150)
    assert curve[-1]["block"] > 2.5 > curve[0]["block"]
    assert curve[-1]["tree"] >= curve[-1]["block"]

    output = tmp_path / "trained" / "draft"
    model = DraftModel.load(output, tmp_path / "target", torch.float32, CPU)
    assert model.config.draft_vocab_size == 400
    kv = model.new_context()
    model.write_context([ContextRows(kv, 0, torch.zeros(1, 128))])
    assert len(model.draft([BlockRequest(kv, 1, 5, 3)])[0]) == 3
    card = (output / "README.md").read_text()
    assert "A DFlash draft model for target" in card
    assert "72 conversations, 1,728 answer tokens" in card
    assert "| 150 |" in card
    assert "| draft model | block of 4 |" in card

    again = tandem("draft-train", "--config", file, "--skip-data")
    assert again.exit_code == 0, again.output
    assert "150 steps in all" in again.stdout
    figures = tmp_path / "figures.json"
    models = ("--target", tmp_path / "target", "--draft-model", output)
    asked = ("--prompts", tmp_path / "held_out.jsonl", "--max-tokens", "12", "--temperatures", "0,0.7")
    measured = tandem("draft-eval", *models, *asked, "--trees", "8,32", "--json", figures)
    assert measured.exit_code == 0, measured.output
    rows = {(r["temperature"], r["source"], r["budget"], r["kind"]): r for r in json.loads(figures.read_text())}
    assert len(rows) == 2 * 2 * 3 * 3
    assert rows[0.0, "draft model", "block of 4", "all"]["acceptance_length"] == pytest.approx(curve[-1]["block"])
    assert rows[0.0, "draft model", "tree of 32", "all"]["acceptance_length"] == pytest.approx(curve[-1]["tree"])


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C while training saves and exports, with exit code 0; the run goes on from there."""
    file = learnable_run(tmp_path, steps=10**6)
    process = start("draft-train", "--config", file)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "progress.jsonl").is_file() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    assert "stopping after this step" in err
    assert "exported to" in out
    steps = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["progress"]["step"]
    assert steps > 0
    assert f"{steps} steps in all" in out


@pytest.mark.slow
def test_data_only(tmp_path: Path) -> None:
    """Writes data and stops: nothing is trained."""
    chatting_target(tmp_path / "target")
    file = write_run(tmp_path, data={"writers": 2, "answer_tokens": 300})
    result = tandem("draft-train", "--config", file, "--data-only")
    assert result.exit_code == 0, result.output
    assert "answer tokens" in result.stdout
    names = {path.name[:2] for path in (tmp_path / "run" / "data").glob("*.jsonl.gz")}
    assert names == {"w0", "w1"}
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
    assert not (tmp_path / "trained").exists()


def test_errors_of_draft_train(tmp_path: Path) -> None:
    """One line per problem and exit code 2, before anything is written."""
    chatting_target(tmp_path / "target")
    missing = tandem("draft-train", "--config", tmp_path / "none.yaml")
    file = write_run(tmp_path, draft={"target_layer_ids": [7]})
    unsuitable = tandem("draft-train", "--config", file)
    write_run(tmp_path)
    no_data = tandem("draft-train", "--config", file, "--skip-data")
    for result, reason in (
        (missing, "none.yaml: No such file or directory"),
        (unsuitable, "draft.target_layer_ids: must be at most 2"),
        (no_data, "0 conversations, a step takes 4"),
    ):
        assert result.exit_code == 2
        (line,) = [line for line in result.stderr.strip().splitlines() if " INFO " not in line]
        assert line.startswith("error:")
        assert reason in line
    assert not (tmp_path / "run" / "data").exists()


def test_a_failing_writer_ends_the_command(tmp_path: Path) -> None:
    """The writers' own reason is on stderr in one line each, the command says that one failed, exit code 2."""
    chatting_target(tmp_path / "target")
    process = start("draft-train", "--config", write_run(tmp_path, data={"max_prompt_tokens": 8, "writers": 2}))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "data.max_prompt_tokens: 8 leaves a user no room" in err
    assert "error: a data writer failed" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"--dtype": "int8"}, "--dtype: must be float32 or bfloat16"),
        ({"--trees": "8,many"}, "--trees, --temperatures: must be numbers"),
        ({"--trees": "0"}, "--trees: must be at least 1"),
        ({"--temperatures": "3"}, "--temperatures: must be 0 to 2"),
        ({"--temperatures": "nan"}, "--temperatures: must be 0 to 2"),
        ({"--prompts": "nowhere.jsonl"}, "nowhere.jsonl: "),
        ({"--prompts": "empty.jsonl"}, "empty.jsonl: holds no prompts"),
        ({"--target": "nowhere"}, "nowhere/tokenizer.json: is missing"),
        ({"--draft-model": "target"}, "target/config.json: architectures: must be"),
        ({"--json": "nowhere/x.json"}, "--json nowhere/x.json: No such file"),
    ],
)
def test_errors_of_draft_eval(
    changes: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names option or file, exit code 2."""
    chatting_target(tmp_path / "target")
    write_run(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    options = {"--target": "target", "--draft-model": "target", "--prompts": "held_out.jsonl", **changes}
    result = tandem("draft-eval", *(part for option in options.items() for part in option))
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert reason in line
