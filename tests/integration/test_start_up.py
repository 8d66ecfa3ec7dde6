"""A service that cannot start says why in one line that names the key, file or tensor, and exits 2 before SERVING."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_models import constant_draft, map_target


@pytest.fixture
def models(tmp_path: Path) -> Path:
    map_target(tmp_path / "target", [0] * 512)
    constant_draft(tmp_path / "draft", mask_token=3)
    return tmp_path


def start(folder: Path, service: str = "verifier_service", **sections: Any) -> subprocess.CompletedProcess[str]:
    config = {"target": "target", "draft_model": "draft", **sections}
    path = folder / "stack.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", service, "--config", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    # What gRPC's C core writes itself is not ours.
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("E", "I", "W", "20"))]
    assert len(lines) == 1, result.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("service", ["gateway", "verifier_service", "drafter_service"])
def test_an_unknown_key(models: Path, service: str) -> None:
    refused(start(models, service, verifier={"kv_blokcs": 3}), "verifier.kv_blokcs", "unknown key")


@pytest.mark.parametrize(
    ("service", "key"), [("verifier_service", "verifier.listen"), ("drafter_service", "drafter.listen")]
)
def test_a_port_in_use(models: Path, service: str, key: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        refused(start(models, service, **{key.split(".")[0]: {"listen": address}}), key, address)


def test_a_missing_tensor(models: Path) -> None:
    file = models / "target" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    refused(start(models, verifier={"listen": "127.0.0.1:0"}), "model.layers.1.mlp.up_proj.weight", "missing")


def test_a_tensor_of_another_shape(models: Path) -> None:
    file = models / "target" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    save_file(tensors, file)
    refused(start(models, verifier={"listen": "127.0.0.1:0"}), str(file), "model.norm.weight", "[5]", "[128]")


def test_a_tensor_too_many(models: Path) -> None:
    file = models / "target" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.bias"] = tensors["model.norm.weight"].clone()
    save_file(tensors, file)
    refused(start(models, verifier={"listen": "127.0.0.1:0"}), "unexpected", "model.layers.0.self_attn.q_proj.bias")


def test_a_file_cut_short(models: Path) -> None:
    file = models / "target" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(start(models, verifier={"listen": "127.0.0.1:0"}), str(file), "cannot be read")


def test_an_architecture_that_is_not_supported(models: Path) -> None:
    config = models / "target" / "config.json"
    data = json.loads(config.read_text())
    config.write_text(json.dumps({**data, "architectures": ["GptOssForCausalLM"]}))
    refused(start(models, verifier={"listen": "127.0.0.1:0"}), "architectures", "GptOssForCausalLM", "LlamaForCausalLM")


def test_a_draft_model_of_another_vocabulary(models: Path) -> None:
    config = models / "draft" / "config.json"
    data = json.loads(config.read_text())
    config.write_text(json.dumps({**data, "vocab_size": 99}))
    refused(start(models, verifier={"listen": "127.0.0.1:0"}), "vocab_size", "99", "512")


def test_taps_beyond_the_target(models: Path) -> None:
    config = models / "draft" / "config.json"
    data = json.loads(config.read_text())
    data["dflash_config"]["target_layer_ids"] = [0, 40]
    config.write_text(json.dumps(data))
    refused(start(models, verifier={"listen": "127.0.0.1:0"}), "target_layer_ids", "40")
