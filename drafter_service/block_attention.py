"""Attention of a block's slots over their sequence's context and over each other."""

import torch
import torch.nn.functional as F

from drafter_service.context_kv import ContextKV
from tandem.checkpoints.draft_config import DraftConfig, DraftLayer


class BlockAttention:
    """One sequence's attention in one forward: its context, its block, and what its slots may see of both."""

    def __init__(self, kv: ContextKV, base: int, config: DraftConfig, device: torch.device):
        """The block stands behind the first `base` positions of kv."""
        self._base = base
        self._end = base + config.block_size
        self._store = kv.reserve(self._end)
        self._layers = config.layers
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self._device = device
        self._masks: dict[DraftLayer, torch.Tensor | None] = {}

    def attend(self, index: int, queries: torch.Tensor, block_kv: torch.Tensor) -> torch.Tensor:
        """queries [1, kv_heads, groups x block, head_dim]; block_kv [2, kv_heads, block, head_dim], which is written
        behind the context -> shape of queries."""
        store = self._store[index]
        store[:, :, self._base : self._end] = block_kv
        layer = self._layers[index]
        if layer not in self._masks:
            self._masks[layer] = self._mask(layer)
        seen = store[:, None, :, self._first_seen(layer) : self._end]
        return F.scaled_dot_product_attention(queries, seen[0], seen[1], attn_mask=self._masks[layer])

    def _first_seen(self, layer: DraftLayer) -> int:
        return 0 if layer.window is None else max(0, self._base - layer.window + 1)

    def _mask(self, layer: DraftLayer) -> torch.Tensor | None:
        """[groups x block, seen positions] of bool, or None where everything is seen."""
        if layer.window is None and not layer.causal:
            return None
        keys = torch.arange(self._first_seen(layer), self._end, device=self._device)
        queries = torch.arange(self._base, self._end, device=self._device)
        ahead = keys - queries[:, None]
        visible = ahead <= 0 if layer.causal else torch.ones_like(ahead, dtype=torch.bool)
        if layer.window is not None:
            visible &= ahead.abs() < layer.window
        return visible.repeat(self._groups, 1)
