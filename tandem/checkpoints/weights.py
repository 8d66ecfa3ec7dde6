"""Weights of a model on their way from a checkpoint folder to a device: one rank's part, in the form it is used in."""

from collections.abc import Callable, Sequence

import torch

from tandem.checkpoints.folder import FLOATS, INTEGERS, CheckpointFolder
from tandem.checkpoints.gguf_blocks import BlockWeight
from tandem.checkpoints.quantized import FP8, INT4, fp8_linear, int4_linear, quantization_method
from tandem.checkpoints.shard import WHOLE, Shard
from tandem.errors import StartupError
from tandem.layers.fp8_linear import Fp8Linear
from tandem.layers.int4_linear import Int4Linear
from tandem.layers.linear import Linear

AnyLinear = Linear | Fp8Linear | Int4Linear

_DERIVED = (".rotary_emb.inv_freq",)
"""Tensors that old checkpoints hold and that follow from the config."""


class WeightReader:
    """Reads one rank's part of a checkpoint. Every failure is a StartupError that names the file and the tensor.

    Of a file only the pages of that part are read. At most one layer's weights exist twice at a time.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        progress: Callable[[str, int], None] | None = None,
    ):
        """prefix: stands before every name in the checkpoint. progress: told name and bytes of each part read."""
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._prefix = prefix
        self._progress = progress
        self._method = quantization_method(folder)

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._folder

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        shard: Shard = WHOLE,
        dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor of the whole shape `shape`, of which only the shard's part of `dim` is read."""
        dtype = dtype or self._dtype
        stored = self._part(name, shape, FLOATS if dtype.is_floating_point else INTEGERS, shard, dim)
        return stored.to(self._device, dtype, copy=True)

    def linear(
        self, names: Sequence[tuple[str, int]], in_features: int, shard: Shard = WHOLE, dim: int = 0
    ) -> AnyLinear:
        """One layer of several weights [out, in], their rows one after another, all stored in the same form.

        names: (name without `.weight`, out) of each. dim 0 splits the rows of each, 1 the columns of all.
        """
        quantized = self._quantized(names, in_features, shard, dim)
        if quantized:
            return quantized
        weight = self._dense(names, in_features, shard, dim)
        self._folder.release()
        return Linear(weight)

    def dense(self, name: str, shape: tuple[int, int], shard: Shard = WHOLE, dim: int = 0) -> torch.Tensor:
        """A weight [out, in] whatever form it is stored in. name: without `.weight`."""
        names = [(name, shape[0])]
        quantized = self._quantized(names, shape[1], shard, dim)
        return quantized.dense(self._dtype) if quantized else self._dense(names, shape[1], shard, dim)

    def blocks(self, name: str, shape: tuple[int, int]) -> BlockWeight | None:
        """A whole weight that is stored in a GGUF's blocks, in them; None if it is not."""
        weight = self._folder.blocks(self._prefix + name, shape)
        if weight:
            self._report(name, weight.nbytes)
        return weight

    def skip(self, *names: str) -> None:
        """Tensors that are another rank's or not used: names, or prefixes that end in a dot. None needs to be there."""
        self._folder.skip(*(self._prefix + name for name in names))

    def check_all_read(self) -> None:
        """StartupError if the folder holds a tensor that nothing asked for or skipped."""
        self._folder.check_all_read(ignore_suffixes=_DERIVED)

    def _dense(self, names: Sequence[tuple[str, int]], in_features: int, shard: Shard, dim: int) -> torch.Tensor:
        parts = [self._part(f"{name}.weight", (out, in_features), FLOATS, shard, dim) for name, out in names]
        return torch.cat(parts).to(self._device, self._dtype)

    def _part(self, name: str, shape: tuple[int, ...], kinds: Sequence[str], shard: Shard, dim: int) -> torch.Tensor:
        part = shard.of(shape[dim], f"{name} (dimension {dim})")
        stored = self._folder.part(self._prefix + name, shape, kinds, dim, part)
        self._report(name, stored.nbytes)
        return stored

    def _quantized(
        self, names: Sequence[tuple[str, int]], in_features: int, shard: Shard, dim: int
    ) -> Fp8Linear | Int4Linear | None:
        form = self._form([self._prefix + name for name, _ in names])
        if form is None:
            return None
        by_rows, by_columns = (shard, WHOLE) if dim == 0 else (WHOLE, shard)
        weights = [(self._prefix + name, out, by_rows.of(out, f"{name} (dimension 0)")) for name, out in names]
        columns = by_columns.of(in_features, f"{names[0][0]} (dimension 1)")
        read = fp8_linear if form == FP8 else int4_linear
        layer = read(self._folder, weights, in_features, columns).to(self._device)
        self._report(names[0][0], layer.nbytes)
        return layer

    def _form(self, names: list[str]) -> str | None:
        forms: dict[str, str | None] = {}
        for name in names:
            if f"{name}.weight_packed" in self._folder:
                forms[f"{name}.weight_packed"] = INT4
            else:
                quantized = self._folder.kind(f"{name}.weight").startswith("F8")
                forms[f"{name}.weight"] = FP8 if quantized else None
        (tensor, form), *others = forms.items()
        for other, its in others:
            if its != form:
                raise StartupError(
                    f"{self._folder.path}: tensors {tensor} and {other} are used together, but are stored in the forms "
                    f"{form or 'plain'} and {its or 'plain'}"
                )
        if form and form != self._method:
            raise StartupError(
                f"{self._folder.path}: tensor {tensor} is stored in the form {form}, but config.json's "
                f"quantization_config.quant_method says {self._method}"
            )
        return form

    def _report(self, name: str, size: int) -> None:
        if self._progress:
            self._progress(name, size)
