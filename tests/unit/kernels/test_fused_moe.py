"""The fused mixture of experts, as reference and as kernel, against dequantised weights in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tandem.errors import StartupError
from tandem.kernels.expert_stack import ExpertStack
from tandem.kernels.fused_moe import fused_moe
from tandem.kernels.triton.fused_moe import _nibbles, launch_fused_moe
from tandem.layers.fp8_linear import Fp8Linear
from tandem.layers.int4_linear import Int4Linear
from tandem.layers.linear import Linear
from tests.unit.kernels.experts import routing, said_by_held, stack

Mixture = Callable[[torch.Tensor, ExpertStack, torch.Tensor, torch.Tensor], torch.Tensor]

_SMALL = {"block_rows": 16, "block_columns": 32, "block_k": 32, "num_warps": 4, "num_stages": 1}


def _kernel(x: torch.Tensor, experts: ExpertStack, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return launch_fused_moe(x, experts, weights, places, _SMALL)


_IMPLEMENTATIONS = pytest.mark.parametrize("mixture", [fused_moe, _kernel], ids=["reference", "kernel"])
_FORMS = pytest.mark.parametrize("form", ["plain", "int4", "fp8"])


@_IMPLEMENTATIONS
@_FORMS
@pytest.mark.parametrize(
    ("rows", "k", "how"),
    [(1, 3, "any"), (19, 2, "any"), (35, 2, "one expert"), (3, 2, "none held"), (1, 1, "one expert")],
)
def test_a_mixture_is_what_its_experts_say(mixture: Mixture, form: str, rows: int, k: int, how: str) -> None:
    """Rows, columns and groups that are no multiples of a tile; experts without rows, with all, held elsewhere."""
    experts = stack(form, 3, hidden=96, inner=96, dtype=torch.float32, first_column=32)
    weights, places = routing(rows, k, experts.count, how)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1))
    said = mixture(x, experts, weights, places)
    assert said.dtype == torch.float32
    torch.testing.assert_close(said.double(), said_by_held(x, experts, weights, places), rtol=1e-5, atol=1e-5)


@_FORMS
def test_the_kernel_tiles_what_is_larger_than_a_tile(form: str) -> None:
    """The default tiles over several tiles of rows and columns, in fp16."""
    experts = stack(form, 2, hidden=160, inner=64, dtype=torch.float16)
    weights, places = routing(21, 1, experts.count, "one expert")
    x = torch.randn(21, 160, generator=torch.Generator().manual_seed(2)).half()
    said = launch_fused_moe(x, experts, weights, places)
    torch.testing.assert_close(said.double(), said_by_held(x, experts, weights, places), rtol=1e-2, atol=1e-2)


@triton.jit
def _store_nibbles(words_ptr, scale_ptr, out_ptr, dtype: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 2 + tl.arange(0, 2)[None, :]
    values = _nibbles(tl.load(words_ptr + tl.arange(0, 16)[:, None]), tl.load(scale_ptr + at), dtype)
    tl.store(out_ptr + at, values)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
def test_nibbles_become_weights_that_are_rounded_once(scale_dtype: torch.dtype) -> None:
    """All 16 in both halves of a word, at their own scales. In fp16, since the interpreter has no bf16 arithmetic."""
    nibbles = torch.stack((torch.arange(16), torch.arange(15, -1, -1)), dim=1)
    words = (nibbles[:, 0] | nibbles[:, 1] << 16 | 0x5A50A5A0).int()
    scale = (torch.rand(16, 2, generator=torch.Generator().manual_seed(4)) / 50).to(scale_dtype)
    found = torch.empty(16, 2, dtype=torch.float16)
    _store_nibbles[(1,)](words, scale, found, tl.float16)
    assert torch.equal(found, ((nibbles - 8).float() * scale.float()).half())


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by numpy's BLAS, which on AMD's CPUs sums a row in another way at the end of a tile; a
    GPU does not. Here it takes the rows one by one."""
    product = np.matmul

    def row_by_row(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        return np.concatenate([product(a[i : i + 1], b, dtype=dtype) for i in range(len(a))])

    monkeypatch.setattr(np, "matmul", row_by_row)


@_IMPLEMENTATIONS
@_FORMS
@pytest.mark.usefixtures("rows_alike")
def test_a_rows_bits_do_not_depend_on_what_shares_the_step(mixture: Mixture, form: str) -> None:
    """From 4 rows on, as a linear layer's do not on CPU."""
    experts = stack(form, 3, hidden=64, inner=32, dtype=torch.float32)
    weights, places = routing(23, 2, experts.count, "any")
    x = torch.randn(23, 64, generator=torch.Generator().manual_seed(3))
    together = mixture(x, experts, weights, places)
    assert torch.equal(mixture(x[:5], experts, weights[:5], places[:5]), together[:5])
    backwards = mixture(x.flip(0), experts, weights.flip(0), places.flip(0))
    assert torch.equal(backwards.flip(0), together)


@_FORMS
def test_a_stack_holds_each_expert_as_it_was_read(form: str) -> None:
    experts = stack(form, 3, hidden=64, inner=32, dtype=torch.float32, first_column=48)
    copy = ExpertStack.of(((experts.gate_up.one(i), experts.down.one(i)) for i in range(3)), 3)
    assert (copy.nbytes, copy.count) == (experts.nbytes, 3)
    for mine, its in ((copy.gate_up, experts.gate_up), (copy.down, experts.down)):
        assert torch.equal(mine.values.view(torch.uint8), its.values.view(torch.uint8))
        assert mine.first_column == its.first_column
        assert (mine.scale is None) == (its.scale is None)
        assert mine.scale is None or its.scale is None or torch.equal(mine.scale, its.scale)


def test_experts_that_are_not_alike_are_refused() -> None:
    plain = Linear(torch.zeros(64, 32)), Linear(torch.zeros(32, 32))
    int4 = Int4Linear(torch.zeros(64, 16, dtype=torch.uint8), torch.zeros(64, 1))
    with pytest.raises(StartupError, match=r"number 1 .*torch.uint8 \[64, 16\] and torch.float32 \[64, 32\]"):
        ExpertStack.of([plain, (int4, plain[1])], 2)
    fp8 = Fp8Linear(torch.zeros(64, 32).to(torch.float8_e4m3fn), torch.zeros(64, 1), first_column=24)
    with pytest.raises(StartupError, match="column 24 of a block of 128"):
        ExpertStack.of([(fp8, fp8)], 1)
