"""Rows sampled together choose what the sampler chooses for each alone, as reference and as kernel."""

from collections.abc import Callable

import pytest
import torch

from tandem.kernels.sampling import sample_rows
from tandem.kernels.triton.sampling import launch_sample
from tandem.position_random import position_uniforms
from tandem.sampling import SamplingParams
from verifier_service.sampler import sample

Op = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _kernel(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    return launch_sample(logits, temperatures, uniforms, piece=128)


_IMPLEMENTATIONS = pytest.mark.parametrize("op", [sample_rows, _kernel], ids=["reference", "kernel"])


@_IMPLEMENTATIONS
@pytest.mark.parametrize(("rows", "vocab", "spread"), [(15, 400, 3.0), (15, 128, 0.1), (5, 77, 10.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_chooses_what_the_sampler_chooses(op: Op, dtype: torch.dtype, rows: int, vocab: int, spread: float) -> None:
    """At every row's own temperature, 0 among them, from its own random number; some tokens are masked. Ten times the
    rows for the reference, which is quicker than the interpreter."""
    rows *= 1 if op is _kernel else 10
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)
    logits.masked_fill_(torch.rand(rows, vocab, generator=generator) < 0.2, -torch.inf)
    temperatures = torch.tensor([0.0, 0.3, 0.7, 1.0, 1.9]).repeat(rows // 5 + 1)[:rows]
    uniforms = torch.from_numpy(position_uniforms(7, 100, rows))
    chosen = op(logits, temperatures, uniforms)
    assert chosen.dtype == torch.int64
    expected = [
        sample(logits[i], SamplingParams(temperature=float(t), seed=7), 100 + i) for i, t in enumerate(temperatures)
    ]
    assert chosen.tolist() == expected


@_IMPLEMENTATIONS
def test_the_borders_between_tokens(op: Op) -> None:
    """Four equal tokens among masked ones, at numbers on, below and above where they meet."""
    logits = torch.full((1, 400), -torch.inf)
    logits[0, [3, 127, 128, 390]] = 1.5
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.7499999, 0.75, 1 - 2**-53], dtype=torch.float64)
    chosen = op(logits.expand(7, -1).contiguous(), torch.ones(7), uniforms)
    assert chosen.tolist() == [3, 3, 127, 128, 128, 390, 390]


@_IMPLEMENTATIONS
def test_greedy_rows_take_the_first_of_equals(op: Op) -> None:
    logits = torch.zeros(3, 300)
    logits[1, [130, 299]] = 2.0
    logits[2, [5, 290]] = 2.0
    uniforms = torch.full((3,), 0.9, dtype=torch.float64)
    assert op(logits, torch.zeros(3), uniforms).tolist() == [0, 130, 5]
