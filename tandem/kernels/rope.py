"""What lies between a layer's projections and its attention: norms of the heads, rotation, keeping keys and values.

Each is one launch on a GPU, where the torch operations would be up to nine. Rotations are (cos, sin) of the rows,
[rows, 1, dim], as `tandem.layers.rope.rope_table` makes them.
"""

import torch

from tandem.kernels.rms_norm import rms_norm
from tandem.layers.rope import apply_rope, apply_rope_to_pairs

Rotation = tuple[torch.Tensor, torch.Tensor]


def rope(x: torch.Tensor, rotation: Rotation, in_pairs: bool) -> torch.Tensor:
    """x [rows, heads, dim], any strides but the last, rotated. in_pairs: neighbours turn together (DeepSeek); else
    dimensions half a head apart."""
    if x.is_cuda:
        from tandem.kernels.triton.rope import launch_rope

        return launch_rope(x, rotation, in_pairs)
    return (apply_rope_to_pairs if in_pairs else apply_rope)(x, *rotation)


def keep_keys_and_values(
    qkv: torch.Tensor,
    heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotation: Rotation,
    kv: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values to their slots and return the queries, [rows, heads, dim].

    qkv [rows, heads + 2 * kv_heads, dim]: queries, keys, values. norms: weights [dim] of RMSNorms that queries and keys
    take before they are rotated. kv [blocks, block_tokens, 2, kv_heads, dim], contiguous. slots [rows] int64.
    """
    if qkv.is_cuda:
        from tandem.kernels.triton.rope import launch_keep_keys_and_values

        return launch_keep_keys_and_values(qkv, heads, norms, eps, rotation, kv, slots)
    turning = qkv.shape[1] - kv.shape[3]
    qk = qkv[:, :turning]
    if norms:
        parts = zip(qk.split([heads, kv.shape[3]], dim=1), norms, strict=True)
        qk = torch.cat([rms_norm(part, norm, eps) for part, norm in parts], dim=1)
    rotated = apply_rope(qk, *rotation)
    q, k = rotated[:, :heads], rotated[:, heads:]
    kv.flatten(0, 1).index_copy_(0, slots, torch.stack((k, qkv[:, turning:]), dim=1))
    return q


def keep_latents(
    squeezed: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotation: Rotation,
    in_pairs: bool,
    kv: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write each row's key, its latent after an RMSNorm and behind it its rotated part, to its slot.

    squeezed [rows, latent + dim], rows any stride apart. norm [latent]. kv [blocks, block_tokens, 1, 1, latent + dim],
    contiguous. slots [rows] int64.
    """
    if squeezed.is_cuda:
        from tandem.kernels.triton.rope import launch_keep_latents

        launch_keep_latents(squeezed, norm, eps, rotation, in_pairs, kv, slots)
        return
    latent, turning = squeezed.split([len(norm), squeezed.shape[1] - len(norm)], dim=-1)
    turned = (apply_rope_to_pairs if in_pairs else apply_rope)(turning[:, None], *rotation)
    key = torch.cat((rms_norm(latent, norm, eps)[:, None], turned), dim=-1)
    kv.flatten(0, 1).index_copy_(0, slots, key[:, None])
