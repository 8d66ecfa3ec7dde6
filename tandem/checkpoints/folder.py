"""A model folder in Hugging Face format: config.json and safetensors, one file or indexed shards."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandem.errors import StartupError


class CheckpointFolder:
    """Reads tensors lazily, by name, and remembers which were read.

    Every failure is a StartupError that names the file and the tensor or key.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        self._handles: dict[Path, Any] = {}
        self._files = self._locate()
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor, checked against `shape` and converted to `dtype`."""
        file = self._files.get(name)
        if file is None:
            raise StartupError(f"{self.path}: tensor {name} is missing")
        tensor: torch.Tensor = self._handle(file).get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise StartupError(f"{file}: tensor {name} has shape {list(tensor.shape)}, config.json means {list(shape)}")
        self._read.add(name)
        return tensor.to(dtype)

    def check_all_read(self, ignore_suffixes: tuple[str, ...] = ()) -> None:
        """StartupError if the folder holds a tensor that nothing asked for."""
        extra = sorted(n for n in set(self._files) - self._read if not n.endswith(ignore_suffixes))
        if extra:
            raise StartupError(f"{self._files[extra[0]]}: unexpected tensor {extra[0]} ({len(extra)} in all)")

    def _handle(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise StartupError(f"{file}: cannot be read: {error}") from None
        return self._handles[file]

    def _locate(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map", {})
            return {name: self.path / file for name, file in weight_map.items()}
        single = self.path / "model.safetensors"
        if not single.is_file():
            raise StartupError(f"{self.path}: no model.safetensors and no model.safetensors.index.json")
        try:
            with safe_open(single, framework="pt") as handle:
                return dict.fromkeys(handle.keys(), single)
        except SafetensorError as error:
            raise StartupError(f"{single}: cannot be read: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; StartupError names the file."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise StartupError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise StartupError(f"{path}: must hold a JSON object")
    return data


def fingerprint(folder: Path) -> str:
    """Identity of a draft model's files: SHA-256 over config.json and, per safetensors file, its header, its size and
    its first and last MiB of data. Reads at most a few MiB, whatever the model's size."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    mib = 2**20
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as handle:
            header = int.from_bytes(handle.read(8), "little")
            digest.update(file.name.encode() + size.to_bytes(8, "little"))
            digest.update(handle.read(min(header + mib, size)))
            handle.seek(max(0, size - mib))
            digest.update(handle.read(mib))
    return digest.hexdigest()[:32]


def eos_token_ids(target: Path) -> list[int]:
    """End-of-sequence ids: config.json's united with generation_config.json's."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (target / name).is_file():
            value = read_json(target / name).get("eos_token_id")
            found |= set(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)
