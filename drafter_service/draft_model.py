"""The DFlash draft network: context keys and values from features, and a block of proposals in one forward.

Source: DFlash (arXiv 2602.06036) and its reference code (PyPI `dflash` 0.1.0). A block holds the anchor and
block_size - 1 mask tokens at the positions from the anchor's on; slot i's output proposes the token at slot i's own
position. Committed positions enter as keys and values of their features only: they have no queries and no MLP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from drafter_service.context_kv import ContextKV
from drafter_service.draft_weights import DraftWeights, LayerWeights, load_weights
from tandem.checkpoints.draft_config import DraftConfig, DraftLayer
from tandem.layers.norm import rms_norm
from tandem.layers.rope import apply_rope, rope_table

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


@dataclass(frozen=True)
class Proposals:
    """block_size - 1 proposals for each request, in order."""

    tokens: list[list[int]]
    log_probs: list[list[float]]
    """Each token's log-probability in its own slot: slots do not see each other's proposals."""


class DraftModel:
    """A loaded draft model. Not thread-safe."""

    def __init__(self, config: DraftConfig, weights: DraftWeights):
        self.config = config
        self._weights = weights
        self._dtype, self._device = weights.embedding.dtype, weights.embedding.device
        positions = config.max_position_embeddings
        self._rope = rope_table(config.rope, config.head_dim, positions, self._dtype).to(self._device)
        """[positions, 2, head_dim]"""

    @classmethod
    def load(cls, draft_folder: Path, target_folder: Path, dtype: torch.dtype, device: torch.device) -> "DraftModel":
        """StartupError names the file and the key or tensor that is wrong."""
        config = DraftConfig.load(draft_folder)
        return cls(config, load_weights(config, draft_folder, target_folder, dtype, device))

    @property
    def max_base(self) -> int:
        """Largest base position with a position left for every slot of the block."""
        return self.config.max_position_embeddings - self.config.block_size

    def new_context(self) -> ContextKV:
        """Room for one sequence's keys and values."""
        config = self.config
        return ContextKV(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, self._dtype, self._device
        )

    @torch.inference_mode()
    def write_context(self, contexts: Sequence[ContextRows]) -> None:
        """Compute and store the keys and values of features. Positions past max_position_embeddings are left out:
        no block can be drafted behind them."""
        limit = self.config.max_position_embeddings
        pieces = [(c.kv, c.start, c.features[: max(0, limit - c.start)]) for c in contexts]
        pieces = [piece for piece in pieces if len(piece[2])]
        if not pieces:
            return
        features = torch.cat([rows for _, _, rows in pieces]).to(self._device, self._dtype)
        rope = torch.cat([self._rope[start : start + len(rows)] for _, start, rows in pieces])
        count = len(features)
        if count < _MIN_ROWS:
            features = F.pad(features, (0, 0, 0, _MIN_ROWS - count))
        config = self.config
        layers, kv_heads, head_dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        kv = self._weights.context_kv(features)[:count].view(count, layers, 2, kv_heads, head_dim)
        keys = F.rms_norm(kv[:, :, 0], (head_dim,), None, config.rms_norm_eps) * self._weights.context_key_norm
        kv[:, :, 0] = apply_rope(keys, rope[:, None, None, 0], rope[:, None, None, 1])
        kv = kv.permute(1, 2, 3, 0, 4)
        first = 0
        for context, start, rows in pieces:
            end = start + len(rows)
            context.reserve(end)[:, :, :, start:end] = kv[:, :, :, first : first + len(rows)]
            first += len(rows)

    @torch.inference_mode()
    def draft(self, requests: Sequence[BlockRequest]) -> Proposals:
        """One forward over the blocks of all requests. Bases must not exceed max_base."""
        logits = self.block_logits(requests)
        best, tokens = logits.max(dim=-1)
        log_probs = best - logits.logsumexp(dim=-1)
        return Proposals(tokens.tolist(), log_probs.tolist())

    @torch.inference_mode()
    def block_logits(self, requests: Sequence[BlockRequest]) -> torch.Tensor:
        """[requests, block_size - 1, vocab_size] fp32, of the slots behind the anchor."""
        config, weights = self.config, self._weights
        block, hidden_size = config.block_size, config.hidden_size
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
            x = x + self._attend(index, layer, rms_norm(x, layer.input_norm, config.rms_norm_eps), cos, sin, attention)
            gate, up = layer.gate_up(rms_norm(x, layer.post_attention_norm, config.rms_norm_eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        x = x.view(len(requests), block, hidden_size)[:, 1:].reshape(-1, hidden_size)
        logits = weights.head(rms_norm(x, weights.norm, config.rms_norm_eps)).float()
        if config.output_multiplier != 1.0:
            logits *= config.output_multiplier
        if config.final_logit_softcapping is not None:
            logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
        return logits.view(len(requests), block - 1, config.vocab_size)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: "list[_SequenceAttention]",
    ) -> torch.Tensor:
        """x [rows, hidden_size], the normed blocks, flat -> the attention sublayer's output, same shape."""
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
        return layer.output(output.permute(0, 3, 1, 2, 4).reshape(sequences * block, heads * head_dim))


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
