"""A model folder in Hugging Face format: config.json and safetensors, one file or indexed shards."""

import ctypes
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandem.checkpoints.gguf_blocks import FORMS, GROUP, METHOD, BlockWeight, Form
from tandem.checkpoints.model_json import read_json, text_config
from tandem.errors import StartupError

_MAX_MAPPED = 64 * 2**20
"""Bytes read from open files before they are closed. Pages of a mapped file count as the process's memory, so a file
that stays open costs what was read of it once more; opening one anew costs its header: milliseconds."""

FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("I8", "U8", "I16", "I32", "I64")
"""Types of tensors that mean their values as they stand, as safetensors names them."""


class CheckpointFolder:
    """Reads tensors lazily, by name, and remembers which were read.

    Every failure is a StartupError that names the file and the tensor or key.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        self._handles: dict[Path, Any] = {}
        self._mapped = 0
        self._files = self._locate()
        self._blocks = self._find_blocks()
        self._read: set[str] = set()
        self._skipped: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's configuration: a multimodal wrapper nests it, otherwise it is the whole."""
        return text_config(self.config)

    @property
    def quantization(self) -> str | None:
        """How weights are quantised, by quantization_config's quant_method."""
        config = self.config.get("quantization_config") or self.text_config.get("quantization_config") or {}
        method: str | None = config.get("quant_method")
        return method

    @property
    def text_prefix(self) -> str:
        """What a multimodal wrapper puts before the names of its language model's tensors."""
        return "language_model." if "text_config" in self.config else ""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor, checked against `shape` and converted to `dtype`."""
        kinds = FLOATS if dtype.is_floating_point else INTEGERS
        return self.part(name, shape, kinds).to(dtype, copy=True)

    def part(
        self, name: str, shape: tuple[int, ...], kinds: Sequence[str], dim: int = 0, part: range | None = None
    ) -> torch.Tensor:
        """Only `part` of dimension `dim`, as stored, of a tensor of the whole shape `shape` and one of `kinds`.

        What is returned lies in the mapped file: copy it, it keeps the file open. A weight in a GGUF's blocks is
        dequantised to bf16, which makes it a tensor like any other.
        """
        if name in self._blocks and "BF16" in kinds:
            return self._dequantised(name, shape, dim, part)
        return self._stored(name, shape, kinds, dim, part)

    def blocks(self, name: str, shape: tuple[int, int]) -> BlockWeight | None:
        """A weight that is stored in a GGUF's blocks, as part() returns tensors; None if it is not."""
        form = self._blocks.get(name)
        if form is None:
            return None
        out, groups = shape[0], (shape[0], shape[1] // GROUP)
        values = (out, shape[1] // 2) if form == "q4" else shape
        weight = BlockWeight(
            form,
            self._stored(f"{name}_{form}", values, ("U8",) if form == "q4" else ("I8",)),
            self._stored(f"{name}_scale", groups, ("F16",)),
            self._stored(f"{name}_min", groups, ("F16",)) if form == "q4" else None,
        )
        self._read.add(name)
        return weight

    def _dequantised(self, name: str, shape: tuple[int, ...], dim: int, part: range | None) -> torch.Tensor:
        out, columns = shape
        weight = self.blocks(name, (out, columns))
        assert weight
        wanted = part or range(shape[dim])
        if dim == 0:
            rows = slice(wanted.start, wanted.stop)
            cut = [None if t is None else t[rows] for t in (weight.values, weight.scales, weight.minima)]
            assert cut[0] is not None
            assert cut[1] is not None
            return BlockWeight(weight.form, cut[0], cut[1], cut[2]).dense().bfloat16()
        return weight.dense()[:, wanted.start : wanted.stop].bfloat16()

    def _stored(
        self, name: str, shape: tuple[int, ...], kinds: Sequence[str], dim: int = 0, part: range | None = None
    ) -> torch.Tensor:
        view = self._slice(name)
        whole, kind = tuple(view.get_shape()), view.get_dtype()
        if whole != shape:
            raise StartupError(
                f"{self._files[name]}: tensor {name} has shape {list(whole)}, config.json means {list(shape)}"
            )
        if kind not in kinds:
            raise StartupError(
                f"{self._files[name]}: tensor {name} is stored as {kind}; supported for it: {', '.join(kinds)}"
            )
        self._read.add(name)
        index = [slice(None)] * len(shape)
        if part is not None:
            index[dim] = slice(part.start, part.stop)
        tensor: torch.Tensor = view[tuple(index)]
        self._mapped += math.prod(shape) * tensor.itemsize if dim else tensor.nbytes
        return tensor

    def kind(self, name: str) -> str:
        """The type that part() gives the tensor in, as safetensors names it: BF16, F8_E4M3, ..."""
        if name in self._blocks:
            return "BF16"
        kind: str = self._slice(name).get_dtype()
        return kind

    def release(self) -> None:
        """Give memory that reading took back to the system, once it is worth it; what was read and copied is safe."""
        if self._mapped > _MAX_MAPPED:
            self._handles.clear()
            self._mapped = 0
            _trim_heap()

    def skip(self, *names: str) -> None:
        """Tensors that are known and not wanted: names, or prefixes that end in a dot. None needs to be there."""
        self._skipped.update(names)

    def check_all_read(self, ignore_suffixes: tuple[str, ...] = ()) -> None:
        """StartupError if the folder holds a tensor that nothing asked for."""
        left = set(self._files) - self._read - self._skipped
        left -= {n for n in left if n.rpartition("_")[0] in self._blocks}
        extra = sorted(n for n in left if not n.endswith(ignore_suffixes) and not self._has_skipped_prefix(n))
        if extra:
            raise StartupError(f"{self._files[extra[0]]}: unexpected tensor {extra[0]} ({len(extra)} in all)")

    def _has_skipped_prefix(self, name: str) -> bool:
        return any(name[: i + 1] in self._skipped for i, character in enumerate(name) if character == ".")

    def _slice(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            raise self._missing(name)
        self.release()
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(file, framework="pt")
            return self._handles[file].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise StartupError(f"{file}: tensor {name} cannot be read: {error}") from None

    def _missing(self, name: str) -> StartupError:
        packed = f"{name}_packed"
        if packed in self._files:
            return StartupError(f"{self._files[packed]}: tensor {packed} is quantised; supported here: {name}")
        return StartupError(f"{self.path}: tensor {name} is missing")

    def _find_blocks(self) -> dict[str, Form]:
        """Weights in a GGUF's blocks, by the name of the whole; they stand among the files by that name as well."""
        if self.quantization != METHOD:
            return {}
        found: dict[str, Form] = {}
        for name in list(self._files):
            for form in FORMS:
                if name.endswith(f".weight_{form}"):
                    found[whole := name.removesuffix(f"_{form}")] = form
                    self._files[whole] = self._files[name]
        return found

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


def _trim_heap() -> None:
    """What is converted on its way leaves holes among what stays: a fifth of a mixture of experts, measured with glibc,
    which gives them back only when told."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


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
