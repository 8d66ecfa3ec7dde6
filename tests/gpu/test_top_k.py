"""The compiled top-k of whole vocabularies against torch in float64."""

import pytest
import torch

from tandem.kernels.top_k import top_k
from tandem.layers.argmax import argmax_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 163840), (56, 163840), (7, 49152), (3, 999)])
@pytest.mark.parametrize("k", [1, 10, 32])
def test_the_largest_and_the_sum(device: torch.device, dtype: torch.dtype, rows: int, vocab: int, k: int) -> None:
    """In bf16 many logits are equal: of those the lowest ids, as a stable sort takes them."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    values, ids, log_sums = (part.cpu() for part in top_k(logits.to(device), k))
    sorted_values, sorted_ids = logits.double().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values.double(), sorted_values[:, :k])
    assert torch.equal(ids, sorted_ids[:, :k])
    torch.testing.assert_close(log_sums.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert torch.equal(argmax_rows(logits.to(device)).cpu(), sorted_ids[:, 0])
