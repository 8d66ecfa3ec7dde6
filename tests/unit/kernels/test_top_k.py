"""The largest logits and logsumexp of rows, as reference and as kernel, against torch in float64."""

from collections.abc import Callable

import pytest
import torch

from tandem.kernels.top_k import top_k
from tandem.kernels.triton.top_k import launch_top_k

Op = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _kernel(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return launch_top_k(logits, k, piece=64)


_IMPLEMENTATIONS = pytest.mark.parametrize("op", [top_k, _kernel], ids=["reference", "kernel"])


@_IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "vocab", "k"), [(2, 300, 32), (1, 64, 1), (2, 130, 8), (1, 5, 5), (2, 256, 20)])
def test_the_largest_and_the_sum(op: Op, dtype: torch.dtype, rows: int, vocab: int, k: int) -> None:
    """Distinct logits, so that the order is one."""
    generator = torch.Generator().manual_seed(vocab)
    places = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])
    logits = ((places - vocab / 2) / 64).to(dtype)
    values, ids, log_sums = op(logits, k)
    expected = logits.double().topk(k)
    assert (values.dtype, ids.dtype, log_sums.dtype) == (torch.float32, torch.int64, torch.float32)
    assert torch.equal(values.double(), expected.values)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(log_sums.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-5)


@_IMPLEMENTATIONS
def test_masked_tokens_come_last_and_add_nothing(op: Op) -> None:
    """Whole pieces of them too."""
    logits = torch.full((2, 300), -torch.inf)
    logits[:, 7], logits[:, 290] = 1.0, 2.0
    values, ids, log_sums = op(logits, 3)
    assert ids[:, :2].tolist() == [[290, 7]] * 2
    assert values.tolist() == [[2.0, 1.0, -torch.inf]] * 2
    torch.testing.assert_close(log_sums, logits.logsumexp(-1))


def test_the_kernel_takes_the_lowest_ids_of_equals() -> None:
    """Within a piece and across pieces, 0 and -0 alike."""
    logits = torch.zeros(1, 200)
    logits[0, ::2] = -0.0
    assert _kernel(logits, 6)[1].tolist() == [[0, 1, 2, 3, 4, 5]]
    logits[0, [199, 60, 130]] = 3.0
    assert _kernel(logits, 4)[1].tolist() == [[60, 130, 199, 0]]


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    for found, expected in zip(_kernel(wide[:, :300], 4), _kernel(wide[:, :300].clone(), 4), strict=True):
        assert torch.equal(found, expected)
