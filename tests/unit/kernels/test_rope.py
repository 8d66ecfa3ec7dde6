"""Rotation and the keeping of keys, the torch reference and the kernels in Triton's interpreter, against rotation of
complex numbers in float64."""

import pytest
import torch

from tandem.kernels import rope as reference
from tandem.kernels.triton.rope import launch_keep_keys_and_values, launch_keep_latents, launch_rope
from tandem.layers.rope import RopeConfig, rope_table

EPS = 1e-6
POSITIONS = torch.tensor([0, 3, 17, 3, 40])
CONFIG = RopeConfig("default", 10000.0, {})


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rotation(dim: int, in_pairs: bool) -> reference.Rotation:
    table = rope_table(CONFIG, dim, 64, torch.float32, in_pairs)
    cos, sin = table.index_select(0, POSITIONS)[:, :, None].unbind(1)
    return cos, sin


def _turned(x: torch.Tensor, in_pairs: bool) -> torch.Tensor:
    """x [rows, heads, dim], of dimensions in pairs or half a head apart."""
    half = x.shape[-1] // 2
    x = x.double()
    pairs = x.unflatten(-1, (half, 2)) if in_pairs else torch.stack(x.split(half, dim=-1), dim=-1)
    angles = torch.outer(POSITIONS.double(), CONFIG.inverse_frequencies(2 * half).double())
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    real = torch.view_as_real(turned)
    return real.flatten(-2) if in_pairs else torch.cat(real.unbind(-1), dim=-1)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("dim", [16, 24])
def test_rope_turns_pairs_by_their_positions(dim: int, in_pairs: bool) -> None:
    """Also heads that lie apart in a wider row, as MLA's do."""
    x = _random(5, 3, dim + 8)[..., 8:]
    for operation in (reference.rope, launch_rope):
        _close(operation(x, _rotation(dim, in_pairs), in_pairs), _turned(x, in_pairs))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24)])
def test_queries_turn_and_keys_and_values_reach_their_slots(heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    qkv = _random(5, heads + 2 * kv_heads, dim)
    norms = (_random(dim, seed=1), _random(dim, seed=2)) if normed else None
    slots = torch.tensor([33, 0, 18, 16, 47])
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if norms:
        q, k = _normed(q, norms[0]), _normed(k, norms[1])
    before = _random(3, 16, 2, kv_heads, dim, seed=3)
    expected = before.double()
    expected.flatten(0, 1)[slots] = torch.stack((_turned(k, False), v.double()), dim=1)
    for operation in (reference.keep_keys_and_values, launch_keep_keys_and_values):
        kv = before.clone()
        _close(operation(qkv, heads, norms, EPS, _rotation(dim, False), kv, slots), _turned(q, False))
        _close(kv, expected)


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize(("latent", "dim"), [(32, 16), (40, 8)])
def test_latents_reach_their_slots_normed_with_the_turned_key_behind(latent: int, dim: int, in_pairs: bool) -> None:
    squeezed = _random(5, 7 + latent + dim)[:, 7:]
    norm = _random(latent, seed=1)
    slots = torch.tensor([33, 0, 18, 16, 47])
    before = _random(3, 16, 1, 1, latent + dim, seed=3)
    expected = before.double()
    turned = _turned(squeezed[:, None, latent:], in_pairs)[:, 0]
    expected.view(48, -1)[slots] = torch.cat((_normed(squeezed[:, :latent], norm), turned), dim=-1)
    for operation in (reference.keep_latents, launch_keep_latents):
        kv = before.clone()
        operation(squeezed, norm, EPS, _rotation(dim, in_pairs), in_pairs, kv, slots)
        _close(kv, expected)
