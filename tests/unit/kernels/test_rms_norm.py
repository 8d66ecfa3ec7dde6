"""RMSNorm, the torch reference and the kernel in Triton's interpreter, against its formula in float64."""

import pytest
import torch

from tandem.kernels.rms_norm import add_rms_norm, rms_norm
from tandem.kernels.triton.rms_norm import launch_add_rms_norm, launch_rms_norm

EPS = 1e-5


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (3, 1000), (2, 3, 24)])
def test_rows_of_any_width(shape: tuple[int, ...]) -> None:
    x, weight = _random(*shape), _random(shape[-1], seed=1)
    for operation in (rms_norm, launch_rms_norm):
        torch.testing.assert_close(operation(x, weight, EPS).double(), _normed(x, weight), rtol=1e-5, atol=1e-5)


def test_columns_of_a_wider_row_and_no_rows() -> None:
    x, weight = _random(4, 100), _random(24, seed=1)
    for operation in (rms_norm, launch_rms_norm):
        result = operation(x[:, 70:94], weight, EPS)
        torch.testing.assert_close(result.double(), _normed(x[:, 70:94], weight), rtol=1e-5, atol=1e-5)
        assert operation(x[:0, :24], weight, EPS).shape == (0, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_sum_is_rounded_before_it_is_normed(dtype: torch.dtype) -> None:
    """So that the next layer, which reads the rounded sum, and this norm mean the same stream."""
    residual, x, weight = (_random(*s, seed=i).to(dtype) for i, s in enumerate([(5, 72), (5, 72), (72,)]))
    loose = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    for operation in (add_rms_norm, launch_add_rms_norm):
        total, normed = operation(residual, x, weight, EPS)
        assert torch.equal(total, residual + x)
        assert normed.dtype == dtype
        torch.testing.assert_close(normed.double(), _normed(total, weight), **loose)
