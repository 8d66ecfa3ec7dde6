"""A draft network's blocks as Python calls them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.native.library import LayerWeights, Matrix, Sizes, address, shape_and_layers

_Pointer, _Int, _Long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Context(ctypes.Structure):
    _fields_ = [("kv", _Pointer), ("capacity", _Long), ("start", _Long), ("rows", _Int), ("anchor", _Int)]
    _fields_ += [("features", _Pointer)]


class _Best(ctypes.Structure):
    _fields_ = [("count", _Int), ("values", _Pointer), ("columns", _Pointer), ("totals", _Pointer)]
    _fields_ += [("scores", _Pointer)]


class _Selector(ctypes.Structure):
    _fields_ = [(n, _Pointer) for n in ("projection", "predecessors", "successors", "tokens")]


@dataclass(frozen=True)
class Selector:
    """DFlash2's candidate selector. V: vocabulary, r: rank."""

    projection: Matrix
    """hidden -> r"""
    predecessors: torch.Tensor
    """bf16 [V, r]"""
    successors: torch.Tensor
    """bf16 [V, r]"""


@dataclass(frozen=True)
class Rows:
    """Of one sequence."""

    kv: torch.Tensor
    """Its keys and values, bf16 [layers, capacity, 2, kv heads, head_dim], by position."""
    start: int
    """Position of the first row."""
    count: int
    """Features, or slots wanted behind the anchor."""
    anchor: int = 0
    """Of a block."""
    features: torch.Tensor | None = None
    """To write: bf16 [count, hidden], contiguous."""


@dataclass(frozen=True)
class Best:
    """Of every wanted slot, one block's after another's."""

    columns: torch.Tensor
    """[slots, k] int32: columns of the largest logits, descending; the first of equals first."""
    log_probs: torch.Tensor
    """[slots, k] fp32: theirs, in softmax over the whole head."""
    scores: torch.Tensor | None
    """[slots, k, k] fp32, with a selector: log-probabilities of the k behind each of the k of the slot before; of a
    block's first slot, behind the anchor, in [0]."""


class BlockNetwork:
    """All layers and the head as one call. Calls must not overlap; sequences of a call must be different."""

    def __init__(
        self,
        library: ctypes.CDLL,
        sizes: Sizes,
        layers: Sequence[LayerWeights],
        head: Matrix,
        tokens: torch.Tensor | None,
        selector: Selector | None,
        norm: torch.Tensor,
        embedding: torch.Tensor,
        mask_token: int,
        threads: int,
    ):
        """sizes.vocab: the head's outputs. tokens: [head] int64, of its outputs, if they are not the tokens. norm:
        [hidden] fp32. embedding: [vocabulary, hidden] bf16."""
        assert embedding.dtype == torch.bfloat16
        self.head = sizes.vocab
        """Its outputs."""
        self._library = library
        self._selects = selector is not None
        self._kept = (list(layers), head, tokens, selector, norm, embedding)
        self._rope: torch.Tensor | None = None
        shape, table = shape_and_layers(sizes, layers)
        self._handle = library.tandem_blocks(
            ctypes.byref(shape),
            table,
            head.handle,
            ctypes.byref(_selector(selector, tokens)),
            norm.data_ptr(),
            embedding.data_ptr(),
            mask_token,
            threads,
        )

    @property
    def positions(self) -> int:
        """Those that there are rotations for."""
        return 0 if self._rope is None else len(self._rope)

    def set_rope(self, rope: torch.Tensor) -> None:
        """rope: [positions, 2, head_dim / 2] fp32, cos and sin; must cover all rows of later calls."""
        self._rope = rope
        self._library.tandem_blocks_set_rope(self._handle, rope.data_ptr())

    def write(self, contexts: Sequence[Rows]) -> None:
        """Their features' keys and values."""
        self._library.tandem_blocks_write(self._handle, self._contexts(contexts, 0), len(contexts))

    def draft(self, blocks: Sequence[Rows], k: int) -> Best:
        """A block behind each context, which must have room for it: the anchor and a mask per slot that is wanted."""
        return self._draft(blocks, k, None)

    def logits(self, blocks: Sequence[Rows]) -> torch.Tensor:
        """[wanted slots, head] fp32: what draft chooses from."""
        logits = torch.empty(sum(b.count for b in blocks), self.head)
        self._draft(blocks, 1, logits.data_ptr())
        return logits

    def _draft(self, blocks: Sequence[Rows], k: int, logits: int | None) -> Best:
        rows = sum(b.count for b in blocks)
        values, columns, totals = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int32), torch.empty(rows, 1)
        scores = torch.empty(rows, k, k) if self._selects else None
        scores_at = None if scores is None else scores.data_ptr()
        best = _Best(k, values.data_ptr(), columns.data_ptr(), totals.data_ptr(), scores_at)
        self._library.tandem_blocks_draft(
            self._handle, self._contexts(blocks, 1), len(blocks), ctypes.byref(best), logits
        )
        return Best(columns, values - totals, scores)

    def _contexts(self, rows: Sequence[Rows], anchors: int) -> ctypes.Array[_Context]:
        """anchors: room needed beside the rows."""
        for r in rows:
            end = r.start + anchors + r.count
            assert end <= min(r.kv.shape[1], self.positions), (end, r.kv.shape[1], self.positions)
        return (_Context * len(rows))(
            *(_Context(r.kv.data_ptr(), r.kv.shape[1], r.start, r.count, r.anchor, address(r.features)) for r in rows)
        )

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.tandem_blocks_free(handle)


def _selector(selector: Selector | None, tokens: torch.Tensor | None) -> _Selector:
    if selector is None:
        return _Selector()
    assert selector.predecessors.dtype == selector.successors.dtype == torch.bfloat16
    codebooks = selector.predecessors.data_ptr(), selector.successors.data_ptr()
    return _Selector(selector.projection.handle, *codebooks, None if tokens is None else tokens.data_ptr())
