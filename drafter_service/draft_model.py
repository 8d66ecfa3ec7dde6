"""The DFlash (v1) draft network: context keys and values from features, and a block of proposals in one forward.

Source: DFlash (arXiv 2602.06036) and its reference code (PyPI `dflash` 0.1.0). A block holds the anchor and
block_size - 1 mask tokens at the positions from the anchor's on; slot i's output proposes the token at slot i's own
position. Committed positions enter as keys and values of their features only: they have no queries and no MLP.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from drafter_service.context_kv import ContextKV
from drafter_service.draft_weights import DraftWeights, LayerWeights, load_weights
from tandem.checkpoints.draft_config import DraftConfig, DraftLayer
from tandem.layers.argmax import argmax_rows
from tandem.layers.norm import rms_norm
from tandem.layers.rope import apply_rope, rope_table

logger = logging.getLogger(__name__)

_MIN_ROWS = 4
"""Products over fewer rows may take another kernel with other rounding; with these, a row's result does not depend on
what else is in the batch."""


@dataclass(frozen=True)
class ContextRows:
    """Features of consecutive positions of one sequence."""

    kv: ContextKV
    start: int
    features: torch.Tensor
    """[count, hidden_size], any float dtype."""


@dataclass(frozen=True)
class BlockRequest:
    """A block to draft behind the first `base` positions of a sequence, all of which must be written."""

    kv: ContextKV
    base: int
    anchor: int
    nodes: int
    """Proposals wanted, 1 to block_size - 1. The block has all its slots whatever this is, as in training; only the
    vocabulary projection is spared."""


@dataclass(frozen=True)
class Proposals:
    """What one block proposes, slot by slot."""

    tokens: list[int]
    log_probs: list[float]
    """Each token's log-probability in its own slot: slots do not see each other's proposals."""


class DraftModel:
    """A loaded draft model. Not thread-safe."""

    def __init__(self, config: DraftConfig, weights: DraftWeights):
        self.config = config
        self._weights = weights
        self._dtype, self._device = weights.embedding.dtype, weights.embedding.device
        self._rope = self._rope_rows(config.max_position_embeddings)
        """[positions, 2, head_dim]"""

    @classmethod
    def load(cls, draft_folder: Path, target_folder: Path, dtype: torch.dtype, device: torch.device) -> "DraftModel":
        """StartupError names the file and the key or tensor that is wrong."""
        config = DraftConfig.load(draft_folder)
        return cls(config, load_weights(config, draft_folder, target_folder, dtype, device))

    def new_context(self) -> ContextKV:
        """Room for one sequence's keys and values."""
        config = self.config
        return ContextKV(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, self._dtype, self._device
        )

    @torch.inference_mode()
    def write_context(self, contexts: Sequence[ContextRows]) -> None:
        """Compute and store the keys and values of features, contexts in order; each has at least one row."""
        self._cover(max(c.start + len(c.features) for c in contexts))
        features = torch.cat([c.features for c in contexts]).to(self._device, self._dtype)
        rope = torch.cat([self._rope[c.start : c.start + len(c.features)] for c in contexts])[:, :, None, None]
        config, count = self.config, len(features)
        kv = self._weights.context_kv(_at_least_min_rows(features))[:count]
        kv = kv.view(count, config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        keys = F.rms_norm(kv[:, :, 0], (config.head_dim,), None, config.rms_norm_eps) * self._weights.context_key_norm
        kv[:, :, 0] = apply_rope(keys, rope[:, 0], rope[:, 1])
        kv = kv.permute(1, 2, 3, 0, 4)
        first = 0
        for context in contexts:
            rows, end = len(context.features), context.start + len(context.features)
            context.kv.reserve(end)[:, :, :, context.start : end] = kv[:, :, :, first : first + rows]
            first += rows

    @torch.inference_mode()
    def draft(self, requests: Sequence[BlockRequest]) -> list[Proposals]:
        """One forward over the blocks of all requests, which are of different sequences; greedy in every slot."""
        logits = self.block_logits(requests)
        tokens = argmax_rows(logits)
        best = logits.gather(-1, tokens[:, None])[:, 0]
        log_probs = best - logits.logsumexp(dim=-1)
        if self._weights.draft_tokens is not None:
            tokens = self._weights.draft_tokens[tokens]
        flat_tokens, flat_log_probs = tokens.tolist(), log_probs.tolist()
        proposals, first = [], 0
        for request in requests:
            end = first + request.nodes
            proposals.append(Proposals(flat_tokens[first:end], flat_log_probs[first:end]))
            first = end
        return proposals

    @torch.inference_mode()
    def block_logits(self, requests: Sequence[BlockRequest]) -> torch.Tensor:
        """[sum of nodes, vocab_size] fp32: of the first `nodes` slots behind each request's anchor. With a reduced head
        there is a column for each of its tokens only."""
        config, weights, block = self.config, self._weights, self.config.block_size
        self._cover(max(request.base for request in requests) + block)
        ids = torch.full((len(requests), block), config.mask_token_id)
        ids[:, 0] = torch.tensor([request.anchor for request in requests])
        first_positions = torch.tensor([[request.base] for request in requests])
        positions = (first_positions + torch.arange(block)).flatten().to(self._device)
        rope = self._rope[positions]
        cos, sin = rope[:, None, 0], rope[:, None, 1]
        attention = [_SequenceAttention(request, config, self._device) for request in requests]

        x = F.embedding(ids.flatten().to(self._device), weights.embedding)
        if config.input_embedding_scale != 1.0:
            x = x * config.input_embedding_scale
        for index, layer in enumerate(weights.layers):
            normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
            x = layer.output.added_to(x, self._attend(index, layer, normed, cos, sin, attention))
            gate, up = layer.gate_up(rms_norm(x, layer.post_attention_norm, config.rms_norm_eps)).chunk(2, dim=-1)
            x = layer.down.added_to(x, F.silu(gate) * up)
        wanted = torch.tensor([i * block + slot for i, r in enumerate(requests) for slot in range(1, r.nodes + 1)])
        x = rms_norm(x[wanted.to(self._device)], weights.norm, config.rms_norm_eps)
        logits = weights.head(_at_least_min_rows(x))[: len(wanted)].float()
        if config.output_multiplier != 1.0:
            logits *= config.output_multiplier
        if config.final_logit_softcapping is not None:
            logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
        return logits

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: "list[_SequenceAttention]",
    ) -> torch.Tensor:
        """x [rows, hidden_size], the normed blocks, flat -> [rows, heads x head_dim]."""
        config = self.config
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        sequences, block, groups = len(attention), config.block_size, heads // kv_heads
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, head_dim)
        query_keys = qkv[:, : heads + kv_heads]
        normed = F.rms_norm(query_keys, (head_dim,), None, config.rms_norm_eps) * layer.query_key_norm
        query_keys.copy_(apply_rope(normed, cos, sin))
        # Query heads that share a key head become rows of one attention problem: keys are not expanded.
        queries = qkv[:, :heads].view(sequences, block, kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(sequences, kv_heads, groups * block, head_dim)
        kv = qkv[:, heads:].view(sequences, block, 2, kv_heads, head_dim).permute(0, 2, 3, 1, 4)
        outputs = [a.attend(index, queries[i : i + 1], kv[i]) for i, a in enumerate(attention)]
        output = torch.cat(outputs).view(sequences, kv_heads, groups, block, head_dim)
        return output.permute(0, 3, 1, 2, 4).reshape(sequences * block, heads * head_dim)

    def _cover(self, positions: int) -> None:
        if positions <= len(self._rope):
            return
        if len(self._rope) == self.config.max_position_embeddings:
            logger.warning("a sequence passes the draft model's %d positions: drafts may be poor", len(self._rope))
        self._rope = self._rope_rows(max(positions, 2 * len(self._rope)))

    def _rope_rows(self, positions: int) -> torch.Tensor:
        return rope_table(self.config.rope, self.config.head_dim, positions, self._dtype).to(self._device)


def _at_least_min_rows(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, _MIN_ROWS - len(x))) if len(x) < _MIN_ROWS else x


class _SequenceAttention:
    """One sequence's attention in one forward: its context, its block, and what its slots may see of both."""

    def __init__(self, request: BlockRequest, config: DraftConfig, device: torch.device):
        self._base = request.base
        self._end = request.base + config.block_size
        self._store = request.kv.reserve(self._end)
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
