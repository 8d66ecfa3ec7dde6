"""The 8-bit linear layer: close to the exact product, row by row, whatever the rows beside it."""

import pytest
import torch

from tandem.layers.int8_linear import Int8Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_is_close_to_the_exact_product(rows: int, dtype: torch.dtype) -> None:
    """Rounding to 8 bits costs about 1 % of the result's size, with bias and residual exact on top."""
    torch.manual_seed(rows)
    weight, bias = torch.randn(96, 64), torch.randn(96)
    x, residual = torch.randn(rows, 64).to(dtype), torch.randn(rows, 96).to(dtype)
    exact = x.float() @ weight.t() + bias
    linear = Int8Linear(weight.to(dtype), bias)
    size = exact.norm()
    assert (linear(x).float() - exact).norm() < 0.015 * size
    assert (linear.added_to(residual, x).float() - (exact + residual.float())).norm() < 0.015 * size
    assert linear(x).dtype == dtype


def test_rows_do_not_touch_each_other() -> None:
    """A row's result has the same bits alone and beside rows of any size: scales are per row."""
    torch.manual_seed(0)
    linear = Int8Linear(torch.randn(48, 32))
    x = torch.randn(5, 32) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 7.0])[:, None]
    together = linear(x)
    for i in range(5):
        assert torch.equal(linear(x[i : i + 1])[0], together[i])
    assert torch.equal(together[3], torch.zeros(48))


def test_small_integers_are_exact() -> None:
    """Where every value is a multiple of its scale nothing is rounded: sums are integers."""
    weight = torch.randint(-127, 128, (16, 24)).float()
    x = torch.randint(-127, 128, (4, 24)).float()
    weight[:, 0], x[:, 1] = 127, 127
    torch.testing.assert_close(Int8Linear(weight)(x), x @ weight.t(), rtol=1e-6, atol=1e-2)
