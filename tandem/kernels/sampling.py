"""Choosing the tokens of many rows at once, at given random numbers."""

import torch

from tandem.layers.argmax import argmax_rows


def sample_rows(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """What verifier_service.sampler.sample chooses for parameters without filters: logits [rows, vocab] of any float
    dtype, temperatures [rows] fp32, uniforms [rows] float64 in [0, 1) -> [rows] int64.

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise softmax(logits / temperature) and
    inversion of its cumulative distribution in id order, accumulated in float64. On a CPU the choice is always
    sampler.sample's. The kernel's exponentials differ from torch's in their last bits, so that a number within about
    1e-7 of the border between two tokens may fall to the other one; what it chooses does not depend on the other rows.
    Nothing waits for the device.
    """
    if logits.is_cuda:
        from tandem.kernels.triton.sampling import launch_sample

        return launch_sample(logits, temperatures, uniforms)
    greedy = temperatures == 0
    probs = torch.softmax(logits.float() / torch.where(greedy, 1.0, temperatures)[:, None], dim=-1)
    sums = probs.double().cumsum(-1)
    sampled = torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)[:, 0]
    return torch.where(greedy, argmax_rows(logits), sampled.clamp_(max=logits.shape[1] - 1))
