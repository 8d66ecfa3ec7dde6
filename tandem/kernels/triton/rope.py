"""Rotation, with the norms before it and the writing of keys and values behind it: a program per row and head."""

import torch
import triton
import triton.language as tl

from tandem.kernels.rope import Rotation


def launch_rope(x: torch.Tensor, rotation: Rotation, in_pairs: bool) -> torch.Tensor:
    """See tandem.kernels.rope."""
    rows, heads, dim = x.shape
    cos, sin = rotation
    out = torch.empty((rows, heads, dim), dtype=x.dtype, device=x.device)
    _rope[(rows, heads)](
        x,
        cos,
        sin,
        out,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        sin.stride(0),
        out.stride(0),
        out.stride(1),
        HALF=dim // 2,
        HALF_PADDED=triton.next_power_of_2(dim // 2),
        IN_PAIRS=in_pairs,
        num_warps=1,
    )
    return out


def launch_keep_keys_and_values(
    qkv: torch.Tensor,
    heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotation: Rotation,
    kv: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See tandem.kernels.rope."""
    rows, all_heads, dim = qkv.shape
    cos, sin = rotation
    query_norm, key_norm = norms or (cos, cos)
    queries = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
    _keep_keys_and_values[(rows, all_heads)](
        qkv,
        query_norm,
        key_norm,
        cos,
        sin,
        queries,
        kv,
        slots,
        qkv.stride(0),
        qkv.stride(1),
        cos.stride(0),
        sin.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        heads,
        kv.shape[3],
        eps,
        NORMED=norms is not None,
        HALF=dim // 2,
        HALF_PADDED=triton.next_power_of_2(dim // 2),
        num_warps=1,
    )
    return queries


def launch_keep_latents(
    squeezed: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotation: Rotation,
    in_pairs: bool,
    kv: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See tandem.kernels.rope."""
    latent, half = len(norm), (squeezed.shape[1] - len(norm)) // 2
    cos, sin = rotation
    _keep_latents[(len(squeezed),)](
        squeezed,
        norm,
        cos,
        sin,
        kv,
        slots,
        squeezed.stride(0),
        cos.stride(0),
        sin.stride(0),
        kv.stride(1),
        eps,
        LATENT=latent,
        LATENT_PADDED=triton.next_power_of_2(latent),
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        IN_PAIRS=in_pairs,
        num_warps=2,
    )


@triton.jit
def _rotate(first, second, cos_ptr, sin_ptr, at_first, at_second, mask):
    """The two halves of what turns, in fp32; the sines' signs are in the table."""
    turned_first = first * tl.load(cos_ptr + at_first, mask=mask, other=0.0).to(tl.float32)
    turned_first += second * tl.load(sin_ptr + at_first, mask=mask, other=0.0).to(tl.float32)
    turned_second = second * tl.load(cos_ptr + at_second, mask=mask, other=0.0).to(tl.float32)
    turned_second += first * tl.load(sin_ptr + at_second, mask=mask, other=0.0).to(tl.float32)
    return turned_first, turned_second


@triton.jit
def _rope(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    stride_row,
    stride_head,
    stride_cos,
    stride_sin,
    stride_out_row,
    stride_out_head,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    IN_PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, HALF_PADDED)
    mask = pair < HALF
    at_first = pair * 2 if IN_PAIRS else pair
    at_second = at_first + (1 if IN_PAIRS else HALF)
    x_ptr += row * stride_row + head * stride_head
    out_ptr += row * stride_out_row + head * stride_out_head
    first = tl.load(x_ptr + at_first, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at_second, mask=mask, other=0.0).to(tl.float32)
    first, second = _rotate(
        first, second, cos_ptr + row * stride_cos, sin_ptr + row * stride_sin, at_first, at_second, mask
    )
    tl.store(out_ptr + at_first, first.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + at_second, second.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _keep_keys_and_values(
    qkv_ptr,
    query_norm_ptr,
    key_norm_ptr,
    cos_ptr,
    sin_ptr,
    queries_ptr,
    kv_ptr,
    slots_ptr,
    stride_row,
    stride_head,
    stride_cos,
    stride_sin,
    stride_token,
    stride_value,
    stride_kv_head,
    heads,
    kv_heads,
    eps,
    NORMED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at_first = tl.arange(0, HALF_PADDED)
    mask = at_first < HALF
    at_second = at_first + HALF
    qkv_ptr += row * stride_row + head * stride_head
    first = tl.load(qkv_ptr + at_first, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + at_second, mask=mask, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if head < heads + kv_heads:
        if NORMED:
            norm_ptr = query_norm_ptr if head < heads else key_norm_ptr
            scale = tl.rsqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / (2 * HALF) + eps)
            first *= scale * tl.load(norm_ptr + at_first, mask=mask, other=0.0).to(tl.float32)
            second *= scale * tl.load(norm_ptr + at_second, mask=mask, other=0.0).to(tl.float32)
        first, second = _rotate(
            first, second, cos_ptr + row * stride_cos, sin_ptr + row * stride_sin, at_first, at_second, mask
        )
    if head < heads:
        out_ptr = queries_ptr + (row * heads + head) * (2 * HALF)
    else:
        kv_head = head - heads
        is_value = kv_head >= kv_heads
        kv_head = tl.where(is_value, kv_head - kv_heads, kv_head)
        out_ptr = kv_ptr + slot * stride_token + kv_head * stride_kv_head + tl.where(is_value, stride_value, 0)
    tl.store(out_ptr + at_first, first.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + at_second, second.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _keep_latents(
    squeezed_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    slots_ptr,
    stride_row,
    stride_cos,
    stride_sin,
    stride_token,
    eps,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    IN_PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    squeezed_ptr += row * stride_row
    out_ptr = kv_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_token
    column = tl.arange(0, LATENT_PADDED)
    mask = column < LATENT
    latent = tl.load(squeezed_ptr + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent, axis=0) / LATENT + eps) * weight
    tl.store(out_ptr + column, latent.to(out_ptr.dtype.element_ty), mask=mask)

    pair = tl.arange(0, HALF_PADDED)
    mask = pair < HALF
    at_first = pair * 2 if IN_PAIRS else pair
    at_second = at_first + (1 if IN_PAIRS else HALF)
    first = tl.load(squeezed_ptr + LATENT + at_first, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(squeezed_ptr + LATENT + at_second, mask=mask, other=0.0).to(tl.float32)
    first, second = _rotate(
        first, second, cos_ptr + row * stride_cos, sin_ptr + row * stride_sin, at_first, at_second, mask
    )
    tl.store(out_ptr + LATENT + at_first, first.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + LATENT + at_second, second.to(out_ptr.dtype.element_ty), mask=mask)
