"""The compiled norms in bf16 against the torch reference in fp32."""

import pytest
import torch
import torch.nn.functional as F

from tandem.kernels.rms_norm import add_rms_norm, rms_norm

EPS = 1e-6


@pytest.mark.parametrize("dim", [64, 576, 1536, 4096, 7168])
def test_rows_of_real_widths(dim: int) -> None:
    residual, x = torch.randn(2, 33, dim, device="cuda").bfloat16()
    weight = torch.randn(dim, device="cuda").bfloat16()
    total, normed = add_rms_norm(residual, x, weight, EPS)
    assert torch.equal(total, residual + x)
    for result, of in ((normed, total), (rms_norm(x, weight, EPS), x)):
        expected = F.rms_norm(of.float(), (dim,), weight.float(), EPS)
        torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=1e-2)


def test_columns_of_a_wider_row() -> None:
    x, weight = torch.randn(9, 2112, device="cuda").bfloat16(), torch.randn(1536, device="cuda").bfloat16()
    expected = F.rms_norm(x[:, :1536].float(), (1536,), weight.float(), EPS)
    torch.testing.assert_close(rms_norm(x[:, :1536], weight, EPS).float(), expected, rtol=1e-2, atol=1e-2)
