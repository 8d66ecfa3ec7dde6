"""The GPU check as far as a CPU can prove it: the script runs, parts say what they measured, and failures are told."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_parts import PARTS
from benchmarks.random_weights import KIMI_K2_4_LAYERS, QWEN3_8B, RandomFolder, tiny
from tandem.layers.int4_linear import Int4Linear
from verifier_service.models.loading import load_model

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", list(PARTS))
def test_every_part_measures_all_its_cells(name: str, tmp_path: Path) -> None:
    """In tiny sizes: one JSON row per cell, with the speeds that the table shows."""
    torch.set_num_threads(1)
    gpu_check.one_part(name, tmp_path / "rows.jsonl", is_tiny=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    cells = [row for row in rows if row["what"] != "start"]
    assert len(cells) == {"attention": 8, "mixture": 4}.get(name, 4)
    assert all(row["gb_per_s"] > 0 and row["copy_gb_per_s"] > 0 for row in cells)
    if name.startswith("verify"):
        assert [(row["batch"], row["nodes"]) for row in cells] == [(1, 0), (2, 0), (1, 8), (2, 8)]
        assert all(row["bucket_rows"] >= row["rows"] for row in cells)
        assert all(row["eager_ms"] > 0 and row["captured_ms"] > 0 for row in cells)
    assert gpu_check.tables_of(name, {"rows": rows, "status": "ended", "seconds": 1.0})


def test_the_mixtures_experts_are_stored_in_int4_and_the_dense_target_in_bf16() -> None:
    """Else the bytes that a step reads would be others than a published checkpoint's."""
    cpu = torch.device("cpu")
    kimi = load_model(RandomFolder(tiny(KIMI_K2_4_LAYERS), cpu), torch.bfloat16, cpu)
    (mixture,) = (layer.mlp for layer in kimi._layers if hasattr(layer.mlp, "_experts"))
    assert all(isinstance(linear, Int4Linear) for expert in mixture._experts for linear in expert.linears)
    hidden, inner = 128, 64
    assert kimi.expert_bytes == [3 * hidden * inner // 2 + 3 * hidden * inner // 32 * 2]
    qwen = load_model(RandomFolder(tiny(QWEN3_8B), cpu), torch.bfloat16, cpu)
    assert qwen.expert_bytes == []
    assert qwen.head_bytes == 512 * hidden * 2


def fake_part(script: str, monkeypatch: pytest.MonkeyPatch, limit: float = 30.0) -> None:
    """Parts run this script in place of themselves, with the file for their rows as the only argument."""
    real = gpu_check._run

    def run(command: list[str], seconds: float, environment: dict[str, str]) -> dict[str, Any]:
        return real([sys.executable, "-c", script, command[command.index("--rows") + 1]], seconds, environment)

    monkeypatch.setattr(gpu_check, "_run", run)
    monkeypatch.setitem(gpu_check.LIMITS, "attention", limit)


def check(tmp_path: Path) -> tuple[int, dict[str, Any]]:
    options = argparse.Namespace(tiny=True, parts=["attention"], json=tmp_path / "new" / "gpu.json")
    return gpu_check.check(options), json.loads(options.json.read_text())["parts"]["attention"]


def test_a_part_that_is_cut_off_leaves_the_rows_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = "import sys, time; open(sys.argv[1], 'w').write('{\"what\": 1}\\n'); time.sleep(60)"
    fake_part(hangs, monkeypatch, limit=3.0)
    code, part = check(tmp_path)
    assert part["rows"] == [{"what": 1}]
    assert part["status"] == "cut off after 3 s"
    assert code == 0


def test_a_part_that_fails_makes_the_check_fail_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_part("raise SystemExit('illegal memory access')", monkeypatch)
    code, part = check(tmp_path)
    assert (code, part["status"], part["rows"]) == (1, "failed", [])
    assert "illegal memory access" in part["tail"]


def test_a_gpu_test_that_fails_makes_the_check_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_it.py").write_text("def test_yes(): pass\ndef test_no(): assert 1 > 2\n")
    monkeypatch.chdir(tmp_path)
    part = gpu_check.run_tests(60.0)
    assert part["status"] == "failed"
    assert part["rows"] == [{"tests": 2, "passed": 1, "skipped": 0}]
    assert [name.endswith("::test_no") for name in part["failed"]] == [True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_check_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.check(argparse.Namespace(tiny=False, parts=[], json=None)) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_runs_from_anywhere(tmp_path: Path) -> None:
    """As CI runs it: what is installed is found, a part runs in a process of its own, the JSON is there."""
    command = [
        ROOT / "benchmarks" / "gpu_check.sh",
        "--tiny",
        "--parts",
        "tests,attention",
        "--json",
        tmp_path / "g.json",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "g.json").read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {"tests": "ended", "attention": "ended"}
    assert "of copy" in done.stdout
