"""The native library as Python calls it: handles with a lifetime, tensors by their addresses."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from tandem.checkpoints.gguf_blocks import round_to_q8
from tandem.kernels.step_tables import StepTables
from tandem.layers.rope import RopeConfig, rope_table
from tandem.native.build import CannotBuild, build, cpu_features

Form = Literal["bf16", "q4", "q8"]
_FORMS: dict[Form, int] = {"bf16": 0, "q4": 1, "q8": 2}
GROUP = 32
BLOCK = 16
"""What columns and outputs of a matrix must be multiples of."""

_FLOOR = "avx2"
"""Below it the portable code is right, but slower than torch."""

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int32


class _Shape(ctypes.Structure):
    _fields_ = [(n, _Int) for n in ("layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocab")]
    _fields_ += [("eps", ctypes.c_float)]
    _fields_ += [(n, _Int) for n in ("conv_taps", "conv_group")]


class _Layer(ctypes.Structure):
    _fields_ = [(n, _Pointer) for n in ("q", "k", "v", "o", "gate", "up", "down")]
    _fields_ += [(n, _Pointer) for n in ("input_norm", "post_norm", "q_norm", "k_norm")]
    _fields_ += [(f"{at}_{n}", _Pointer) for at in ("attention", "mlp") for n in ("conv_kernels", "conv_base")]


class _Tables(ctypes.Structure):
    _fields_ = [(n, _Pointer) for n in ("first_rows", "prefixes", "tree_starts", "ancestors", "block_tables")]
    _fields_ += [(n, _Int) for n in ("sequences", "words", "blocks", "block_tokens")]


class _Step(ctypes.Structure):
    _fields_ = [("rows", _Int), ("token_ids", _Pointer), ("positions", _Pointer), ("slots", _Pointer)]
    _fields_ += [("tables", _Tables), ("kv", _Pointer), ("pools", _Int), ("pool_of", _Pointer), ("hidden", _Pointer)]
    _fields_ += [("places", _Pointer), ("taps", _Pointer), ("tap_count", _Int), ("tapped", _Pointer)]
    _fields_ += [("projections", _Pointer), ("feature_norm", _Pointer), ("feature_eps", ctypes.c_float)]
    _fields_ += [("features", _Pointer)]


@dataclass(frozen=True)
class Sizes:
    """Of a decoder, as its config says them."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    conv_taps: int = 0
    """Of DFlash2's convolutions, 0 without them."""
    conv_group: int = 0
    """Channels that share a dynamic weight."""

    def misfit(self, head: str) -> str | None:
        """The size that matrices cannot have here; None if all fit. head: what `vocab` is called."""
        for what, size, step in (
            ("hidden_size", self.hidden, GROUP),
            ("intermediate_size", self.inner, GROUP),
            ("the width of the heads that share a key", self.heads // self.kv_heads * self.head_dim, GROUP),
            ("head_dim", self.head_dim, BLOCK),
            (head, self.vocab, BLOCK),
            ("conv_group_size", self.conv_group, BLOCK),
            ("the width of a convolution's kernels", self._kernels_width(), BLOCK),
        ):
            if size % step:
                return f"{what}, {size}, is not a multiple of {step}"
        return None

    def _kernels_width(self) -> int:
        return 2 * self.conv_taps * self.hidden // self.conv_group if self.conv_taps else 0


def rotations(rope: RopeConfig, head_dim: int, positions: int) -> torch.Tensor:
    """[positions, 2, head_dim / 2] fp32: cos and sin of every position, as decoders take them."""
    table, half = rope_table(rope, head_dim, positions, torch.float32), head_dim // 2
    return torch.stack((table[:, 0, :half], table[:, 1, half:]), dim=1)


@cache
def load(path: Path | None = None) -> ctypes.CDLL:
    """The library at `path`, or this machine's. CannotBuild as build's."""
    library = ctypes.CDLL(str(path or build()))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "matrix": (_Pointer, [_Int, _Int, _Int, _Pointer, _Pointer, _Pointer]),
        "matrix_free": (None, [_Pointer]),
        "matrix_row": (None, [_Pointer, _Int, _Pointer]),
        "decoder": (_Pointer, [_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int]),
        "decoder_free": (None, [_Pointer]),
        "decoder_forward": (None, [_Pointer, _Pointer]),
        "decoder_logits": (None, [_Pointer, _Pointer, _Int, _Pointer]),
        "decoder_seconds": (None, [_Pointer, _Pointer]),
        "blocks": (_Pointer, [_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int, _Int]),
        "blocks_free": (None, [_Pointer]),
        "blocks_set_rope": (None, [_Pointer, _Pointer]),
        "blocks_write": (None, [_Pointer, _Pointer, _Int]),
        "blocks_draft": (None, [_Pointer, _Pointer, _Int, _Pointer, _Pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"tandem_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def why_not_here() -> str | None:
    """What keeps this machine from the library; None: nothing. Builds it if that was not done yet."""
    features = cpu_features()
    if features and _FLOOR not in features:
        return f"the CPU lacks {_FLOOR}"
    try:
        load()
    except CannotBuild as error:
        return str(error)
    return None


class Matrix:
    """A weight [out, in] in the layout that products read."""

    def __init__(
        self,
        library: ctypes.CDLL,
        form: Form,
        values: torch.Tensor,
        scales: torch.Tensor | None = None,
        minima: torch.Tensor | None = None,
    ):
        """bf16: values [out, in]. q4: uint8 [out, in / 2], of a group's byte i the low nibble column i, the high one
        column i + 16. q8: int8 [out, in]. scales, minima: fp16 [out, in / 32]. Everything is copied."""
        out, columns = values.shape[0], values.shape[1] * (2 if form == "q4" else 1)
        assert out % BLOCK == 0, out
        assert columns % GROUP == 0, columns
        self.form: Form = form
        self.out, self.columns = out, columns
        parts = [None if t is None else t.contiguous() for t in (values, scales, minima)]
        addresses = [None if t is None else t.data_ptr() for t in parts]
        self.nbytes = sum(t.nbytes for t in parts if t is not None)
        """Memory it takes."""
        self._library = library
        self.handle = library.tandem_matrix(_FORMS[form], out, columns, *addresses)

    @classmethod
    def of(cls, library: ctypes.CDLL, weight: torch.Tensor, int8: bool) -> "Matrix":
        """weight: [out, in] bf16; int8: rounded to 8 bits per group of 32 columns."""
        if not int8:
            return cls(library, "bf16", weight)
        blocks = round_to_q8(weight)
        return cls(library, blocks.form, blocks.values, blocks.scales)

    def row(self, index: int) -> torch.Tensor:
        """[in] fp32: the values as products take them."""
        to = torch.empty(self.columns)
        self._library.tandem_matrix_row(self.handle, index, to.data_ptr())
        return to

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._library.tandem_matrix_free(handle)


@dataclass(frozen=True)
class Projection:
    """What makes features of taps: RMSNorm(taps W^T)."""

    matrices: list[Matrix]
    """Per tapped layer its columns of W: hidden -> out."""
    norm: torch.Tensor
    """[out] fp32"""
    eps: float

    @cached_property
    def addresses(self) -> Any:
        """Of the matrices, as every step hands them over."""
        return (_Pointer * len(self.matrices))(*(matrix.handle for matrix in self.matrices))


@dataclass(frozen=True)
class LayerWeights:
    """Norms are fp32; those of q and k None where the architecture has none."""

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_conv_kernels: Matrix | None = None
    """Of DFlash2: hidden -> [2 sides, taps, groups]."""
    attention_conv_base: torch.Tensor | None = None
    """[2 sides, taps, hidden] fp32"""
    mlp_conv_kernels: Matrix | None = None
    mlp_conv_base: torch.Tensor | None = None


class Decoder:
    """All layers as one call. Calls must not overlap."""

    def __init__(
        self,
        library: ctypes.CDLL,
        sizes: Sizes,
        layers: Sequence[LayerWeights],
        embedding: Matrix,
        head: Matrix,
        norm: torch.Tensor,
        rope: torch.Tensor,
        threads: int,
    ):
        """norm: [hidden], rope: [positions, 2, head_dim / 2], cos and sin; fp32."""
        self.sizes = sizes
        self._library = library
        self._kept = (list(layers), embedding, head, norm, rope)
        shape, table = shape_and_layers(sizes, layers)
        self._handle = library.tandem_decoder(
            ctypes.byref(shape), table, embedding.handle, head.handle, norm.data_ptr(), rope.data_ptr(), threads
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        tables: StepTables,
        kv: Sequence[torch.Tensor],
        tap_layers: Sequence[int] = (),
        projection: Projection | None = None,
        features: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids, positions, slots: [rows] int64. kv: per layer bf16 [blocks, block_tokens, 2, kv heads, head_dim].

        Returns the residual stream in fp32 [rows, hidden] and, in bf16 [rows, tap_layers * hidden], after each layer of
        tap_layers. With a projection that is not returned, but what it makes of it is written to features [slots, out],
        bf16, at the rows' slots.
        """
        rows, hidden = len(token_ids), self.sizes.hidden
        out = torch.empty(rows, hidden)
        tapped = torch.empty(rows, 0 if projection else len(tap_layers) * hidden, dtype=torch.bfloat16)
        # Locals, so that they live as long as the call.
        pools, layers = _addresses(kv), (_Int * len(tap_layers))(*tap_layers)
        step = _Step(
            rows,
            token_ids.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            _Tables(
                tables.first_rows.data_ptr(),
                tables.prefixes.data_ptr(),
                tables.tree_starts.data_ptr(),
                tables.ancestors.data_ptr(),
                tables.block_tables.data_ptr(),
                len(tables.tree_starts),
                tables.ancestors.shape[1],
                tables.block_tables.shape[1],
                kv[0].shape[1],
            ),
            ctypes.addressof(pools),
            1,
            None,
            out.data_ptr(),
            None,
            ctypes.addressof(layers),
            len(tap_layers),
            tapped.data_ptr() if tapped.numel() else None,
            ctypes.addressof(projection.addresses) if projection else None,
            projection.norm.data_ptr() if projection else None,
            projection.eps if projection else 0.0,
            features.data_ptr() if features is not None else None,
        )
        self._library.tandem_decoder_forward(self._handle, ctypes.byref(step))
        return out, tapped

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden], fp32, as forward returned it. Returns [rows, vocab] fp32."""
        out = torch.empty(len(hidden), self.sizes.vocab)
        self._library.tandem_decoder_logits(self._handle, hidden.contiguous().data_ptr(), len(hidden), out.data_ptr())
        return out

    def seconds(self) -> dict[str, float]:
        """Since the start, by what they were spent on: linears, attention, other, head."""
        values = (ctypes.c_double * 4)()
        self._library.tandem_decoder_seconds(self._handle, values)
        return dict(zip(("linears", "attention", "other", "head"), values, strict=True))

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.tandem_decoder_free(handle)


def shape_and_layers(sizes: Sizes, layers: Sequence[LayerWeights]) -> tuple[ctypes.Structure, ctypes.Array[_Layer]]:
    """As C++ takes them; what they point at is not kept."""
    return _Shape(**vars(sizes)), (_Layer * len(layers))(*(_Layer(*map(address, vars(w).values())) for w in layers))


def address(part: Matrix | torch.Tensor | None) -> int | None:
    """As C++ takes it."""
    if part is None:
        return None
    return part.handle if isinstance(part, Matrix) else part.data_ptr()


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return (_Pointer * len(tensors))(*(t.data_ptr() for t in tensors))
