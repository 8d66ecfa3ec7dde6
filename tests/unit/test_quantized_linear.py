"""Linear layers over quantised weights: rows do not depend on each other, memory is the format's."""

import pytest
import torch

from tandem.layers.fp8_linear import Fp8Linear
from tandem.layers.int4_linear import Int4Linear
from tandem.layers.linear import Linear

OUT, IN = 2112, 448
"""More rows than a tile holds, a partial last tile."""


def layer(form: str) -> Fp8Linear | Int4Linear:
    torch.manual_seed(0)
    if form == "fp8":
        return Fp8Linear(torch.randn(OUT, IN).to(torch.float8_e4m3fn), torch.rand(OUT, 5), first_column=96)
    return Int4Linear(torch.randint(0, 256, (OUT, IN // 2), dtype=torch.uint8), torch.rand(OUT, IN // 32).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_row_has_the_same_bits_whatever_is_beside_it(form: str, dtype: torch.dtype) -> None:
    """From 4 rows on, as plain linears: what losslessness rests on."""
    linear = layer(form)
    x = torch.randn(67, IN).to(dtype)
    residual = torch.randn(67, OUT).to(dtype)
    few, added = linear(x[:4]), linear.added_to(residual[:4], x[:4])
    for rows in (5, 8, 16, 33, 67):
        assert torch.equal(linear(x[:rows])[:4], few)
        assert torch.equal(linear.added_to(residual[:rows], x[:rows])[:4], added)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_the_weight_is_rounded_to_the_type_of_what_it_multiplies(form: str) -> None:
    """Oracle: the plain layer of the dense weight, rounded as a dequantised checkpoint would store it. Same bits."""
    linear = layer(form)
    x = torch.randn(6, IN)
    for dtype in (torch.float32, torch.bfloat16):
        plain = Linear(linear.dense(torch.float32).to(dtype))
        assert torch.equal(linear(x.to(dtype)), plain(x.to(dtype)))


def test_an_int4_expert_takes_four_and_a_half_bits_a_weight() -> None:
    """An expert of Kimi K2 takes 24.77 MB, which is what 8 GPUs have room for."""
    gate, down = (
        Int4Linear(torch.empty(o, i // 2, dtype=torch.uint8), torch.empty(o, i // 32, dtype=torch.bfloat16))
        for o, i in ((2048, 7168), (7168, 2048))
    )
    assert 2 * gate.nbytes + down.nbytes == 24_772_608
