"""Attention over paged KV: equal to the textbook's, and in fp32 a row's bits do not depend on its segment's rows, for
any head width, number of heads per key and form of KV."""

import math

import pytest
import torch

from verifier_service.attention import attend, plan_attention
from verifier_service.step import SegmentRows

BLOCK_TOKENS = 16
CPU = torch.device("cpu")
BLOCKS = [5, 2, 9, 1, 7, 3, 8, 4]
START = 70
ROWS = (1, 2, 3, 5, 8, 11, 12, 17, 22, 33)
"""33 rows and more: a prompt's chunk."""


def attended(q: torch.Tensor, kv: torch.Tensor, scale: float, heads_per_kv_head: int, start: int) -> torch.Tensor:
    """q: [rows, heads, head_dim] of a chain from position `start` on."""
    segment = SegmentRows(0, start, [0] * len(q), [], BLOCKS)
    groups = plan_attention([segment], BLOCK_TOKENS, heads_per_kv_head, q.shape[-1], q.dtype, CPU)
    return attend(q, kv, scale, groups)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "latent"),
    [
        (64, 9, 3, False),
        (64, 4, 4, False),
        (128, 4, 2, False),
        (128, 16, 2, False),
        (256, 2, 2, False),
        (96, 8, 1, True),
        (576, 8, 1, True),
        (576, 1, 1, True),
        (576, 64, 1, True),
    ],
    ids=lambda value: str(value),
)
def test_a_rows_bits_do_not_depend_on_the_others(head_dim: int, heads: int, kv_heads: int, latent: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(10, BLOCK_TOKENS, 1 if latent else 2, kv_heads, head_dim, generator=generator)
    q = torch.randn(max(ROWS), heads, head_dim, generator=generator)
    scale, folded = head_dim**-0.5, heads // kv_heads
    alone = torch.cat([attended(q[i : i + 1], kv, scale, folded, START + i) for i in range(len(q))])
    for rows in ROWS:
        together = attended(q[:rows], kv, scale, folded, START)
        assert torch.equal(together, alone[:rows]), f"{rows} rows"

    flat = kv[BLOCKS].flatten(0, 1)
    keys = flat[:, 0].repeat_interleave(folded, dim=1)
    values = flat[:, -1].repeat_interleave(folded, dim=1)
    for i in (0, len(q) - 1):
        seen = START + i + 1
        scores = torch.einsum("hd,shd->hs", q[i], keys[:seen]) / math.sqrt(head_dim)
        expected = torch.einsum("hs,shd->hd", scores.softmax(dim=-1), values[:seen]).flatten()
        torch.testing.assert_close(alone[i], expected, atol=1e-5, rtol=1e-5)
