"""Compiled sampling against its reference on the CPU, which is the sampler's own choice."""

import pytest
import torch

from tandem.kernels.sampling import sample_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [163840, 49152, 1000])
def test_it_chooses_what_the_reference_chooses(device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    """At every row's own temperature. One number in some thousands may fall on the other side of a border in a
    vocabulary of 163840; 1 row in 256 is allowed to differ."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(256, vocab, generator=generator)).to(dtype)
    temperatures = torch.tensor([0.0, 0.6, 1.0, 1.5]).repeat(64)
    uniforms = torch.rand(256, dtype=torch.float64, generator=generator)
    expected = sample_rows(logits, temperatures, uniforms)
    on_gpu = (logits.to(device), temperatures.to(device), uniforms.to(device))
    found = sample_rows(*on_gpu)
    assert (found.cpu() != expected).sum() <= 1
    assert torch.equal(found[::4].cpu(), expected[::4])
    assert torch.equal(sample_rows(*(part[100:] for part in on_gpu)), found[100:])
