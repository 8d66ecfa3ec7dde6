"""The compiled rotations in bf16 against the torch reference in fp32 on the CPU."""

import pytest
import torch

from tandem.kernels.rope import Rotation, keep_keys_and_values, keep_latents, rope
from tandem.layers.rope import RopeConfig, rope_table

EPS = 1e-6
ROWS = 33


def _random(*shape: int) -> torch.Tensor:
    """Numbers that bf16 holds exactly, on the CPU in fp32."""
    return torch.randn(shape).bfloat16().float()


def _rotation(dim: int, in_pairs: bool) -> Rotation:
    table = rope_table(RopeConfig("default", 1e6, {}), dim, 4096, torch.bfloat16, in_pairs).float()
    cos, sin = table.index_select(0, torch.randint(4096, (ROWS,)))[:, :, None].unbind(1)
    return cos, sin


def _gpu(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.to("cuda", torch.bfloat16) for t in tensors)


def _close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result.float().cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("in_pairs", [False, True])
def test_heads_that_lie_apart(in_pairs: bool) -> None:
    wide, rotation = _random(ROWS, 16, 192), _rotation(64, in_pairs)
    (on_gpu,), turning = _gpu(wide), _gpu(*rotation)
    _close(rope(on_gpu[..., 128:], (turning[0], turning[1]), in_pairs), rope(wide[..., 128:], rotation, in_pairs))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_queries_turn_and_keys_and_values_reach_their_slots(dim: int, normed: bool) -> None:
    qkv, kv = _random(ROWS, 32 + 2 * 8, dim), _random(20, 16, 2, 8, dim)
    norms, rotation = (_random(dim), _random(dim)), _rotation(dim, False)
    slots = torch.randperm(320)[:ROWS]
    gpu_qkv, gpu_kv, q_norm, k_norm, cos, sin = _gpu(qkv, kv, *norms, *rotation)
    gpu_norms = (q_norm, k_norm) if normed else None
    result = keep_keys_and_values(gpu_qkv, 32, gpu_norms, EPS, (cos, sin), gpu_kv, slots.cuda())
    expected = keep_keys_and_values(qkv, 32, norms if normed else None, EPS, rotation, kv, slots)
    _close(result, expected)
    _close(gpu_kv, kv)


@pytest.mark.parametrize("in_pairs", [False, True])
def test_latents_reach_their_slots(in_pairs: bool) -> None:
    squeezed, norm, kv = _random(ROWS, 2112), _random(512), _random(20, 16, 1, 1, 576)
    rotation, slots = _rotation(64, in_pairs), torch.randperm(320)[:ROWS]
    gpu_squeezed, gpu_norm, gpu_kv, cos, sin = _gpu(squeezed, norm, kv, *rotation)
    keep_latents(gpu_squeezed[:, 1536:], gpu_norm, EPS, (cos, sin), in_pairs, gpu_kv, slots.cuda())
    keep_latents(squeezed[:, 1536:], norm, EPS, rotation, in_pairs, kv, slots)
    _close(gpu_kv, kv)
