"""Attention of many blocks to themselves and to the context, which all blocks of a conversation share."""

from dataclasses import dataclass

import torch
from torch import nn

from tandem.checkpoints.draft_config import DraftConfig
from tandem.layers.rope import apply_rope

_PART_ANCHORS = 16


@dataclass(frozen=True)
class View:
    """What all layers attend by."""

    context: torch.Tensor
    """[C, N, hidden_size]: features."""
    context_rope: torch.Tensor
    """[N, 2, 1, head_dim]"""
    block_rope: torch.Tensor
    """[C, A, B, 2, 1, head_dim]"""
    unseen: torch.Tensor
    """[C, 1, A, 1, N] bool: the context that is not before each anchor."""
    part: tuple[int, int]
    """Conversations, and anchors of each, that attend together: on a CPU so few that their scores stay in the cache and
    little context is read that none of them sees; on a GPU all."""
    reach: list[int]
    """Per part, conversation by conversation: context tokens that any of it sees."""


def make_view(context: torch.Tensor, anchors: torch.Tensor, block: int, rope: torch.Tensor) -> View:
    """context [C, N, hidden_size]; anchors [C, A] int64: their positions; rope [positions, 2, head_dim]."""
    device, length = context.device, context.shape[1]
    if device.type == "cpu":
        part = (1, _PART_ANCHORS)
        reach = [int(some.max()) for own in anchors for some in own.split(_PART_ANCHORS)]
    else:
        part, reach = (len(anchors), anchors.shape[1]), [length]
    return View(
        context=context,
        context_rope=rope[:length, :, None],
        block_rope=rope[anchors[:, :, None] + torch.arange(block, device=device)][:, :, :, :, None],
        unseen=torch.arange(length, device=device) >= anchors[:, None, :, None, None],
        part=part,
        reach=reach,
    )


class BlockAttention(nn.Module):
    """Parameters are named as published."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.kv_heads, self.head_dim = config.num_key_value_heads, head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)

    def forward(self, x: torch.Tensor, view: View, first: int) -> torch.Tensor:
        """[C, A, B, hidden_size] -> [C, A, B - first, hidden_size]: the slots from `first` on attend to all."""
        context = view.context
        q = self._heads(self.q_proj(x[:, :, first:]), self.q_norm, view.block_rope[:, :, first:])
        k = self._heads(self.k_proj(x), self.k_norm, view.block_rope)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        context_k = self._heads(self.k_proj(context), self.k_norm, view.context_rope)
        context_v = self.v_proj(context).unflatten(-1, (-1, self.head_dim))
        # Queries [C, kv heads, A, groups, B, D], keys of blocks [C, kv heads, A, B, D], of the context
        # [C, kv heads, N, D]: all queries of a key head are rows of one product.
        q = (q * self.head_dim**-0.5).unflatten(3, (self.kv_heads, -1)).permute(0, 3, 1, 4, 2, 5)
        k, v = (t.permute(0, 3, 1, 2, 4) for t in (k, v))
        context_k, context_v = (t.permute(0, 2, 1, 3) for t in (context_k, context_v))
        conversations, anchors = view.part
        whole = (q, k, v, view.unseen, context_k, context_v)
        reach, rows = iter(view.reach), []
        for *own, own_k, own_v in zip(*(t.split(conversations) for t in whole), strict=True):
            parts = zip(*(t.split(anchors, dim=2) for t in own), strict=True)
            out = [_attend(q, k, v, unseen, own_k, own_v, next(reach)) for q, k, v, unseen in parts]
            rows.append(torch.cat(out, dim=2))
        return self.o_proj(torch.cat(rows).permute(0, 2, 4, 1, 3, 5).flatten(3))

    def _heads(self, x: torch.Tensor, norm: nn.RMSNorm, rope: torch.Tensor) -> torch.Tensor:
        heads = norm(x.unflatten(-1, (-1, self.head_dim)))
        return apply_rope(heads, rope.select(-3, 0), rope.select(-3, 1))


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    unseen: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    reach: int,
) -> torch.Tensor:
    """q [C, kv heads, A, groups, B, D] to blocks' own k, v [C, kv heads, A, B, D] and to the context's
    [C, kv heads, N, D], of which `reach` tokens are seen by any and `unseen` [C, 1, A, 1, N] tells which are not."""
    rows = q.flatten(3, 4)
    far = (rows.flatten(2, 3) @ context_k[:, :, :reach].transpose(-1, -2)).view(*rows.shape[:4], reach)
    far = far.masked_fill(unseen[..., :reach], -torch.inf)
    near = rows @ k.transpose(-1, -2)
    weights = torch.cat((far, near), dim=-1).softmax(dim=-1)
    out = (weights[..., :reach].flatten(2, 3) @ context_v[:, :, :reach]).view_as(rows)
    return (out + weights[..., reach:] @ v).view_as(q)
