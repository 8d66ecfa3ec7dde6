"""The DFlash and DFlash2 draft networks as products over flat rows; where keys and values lie is the caller's.

Source: DFlash (arXiv 2602.06036) and its reference code (PyPI `dflash` 0.1.0). A block holds the anchor and
block_size - 1 mask tokens at the positions from the anchor's on; slot i's output proposes the token at slot i's own
position. Committed positions enter as keys and values of their features only: they have no queries and no MLP. DFlash2
convolves the block's slots around each sublayer and lets a selector choose among each slot's candidates by the token
before.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from drafter_service.draft_weights import ConvWeights, DraftWeights, load_weights
from tandem.checkpoints.draft_config import DraftConfig
from tandem.kernels.rms_norm import rms_norm
from tandem.layers.dflash2 import grouped_conv, split_kernels
from tandem.layers.int8_linear import Int8Linear
from tandem.layers.linear import Linear
from tandem.layers.rope import apply_rope, rope_table

logger = logging.getLogger(__name__)

_MIN_ROWS = 4
"""Products over fewer rows may take another kernel with other rounding; with these, a row's result does not depend on
what else is in the batch."""

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, its product of the normed blocks [rows, heads + 2 x kv_heads, head_dim]: queries, keys, values, of which
nothing is normed or rotated) -> [rows, heads x head_dim]. Rows are the slots of the blocks, one block after another."""


class DraftNetwork:
    """A loaded network. Everything here has the shape of its arguments and waits for no device."""

    def __init__(self, config: DraftConfig, weights: DraftWeights):
        self.config = config
        self.weights = weights
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self.rope = self._rope_rows(config.max_position_embeddings)
        """[positions, 2, head_dim]"""
        self._warned = False

    @classmethod
    def load(
        cls, draft_folder: Path, target_folder: Path, dtype: torch.dtype, device: torch.device, int8: bool = False
    ) -> "DraftNetwork":
        """StartupError names the file and the key or tensor that is wrong. int8: see load_weights."""
        config = DraftConfig.load(draft_folder)
        return cls(config, load_weights(config, draft_folder, target_folder, dtype, device, int8))

    def cover(self, positions: int) -> None:
        """Have rotations for so many positions of a sequence; a new table may be made for them."""
        longest = self.config.max_position_embeddings
        if positions > longest and not self._warned:
            logger.warning("a sequence passes the draft model's %d positions: drafts may be poor", longest)
            self._warned = True
        self.make_room(positions)

    def make_room(self, positions: int) -> None:
        """The same without a sequence that has so many."""
        if positions > len(self.rope):
            self.rope = self._rope_rows(max(positions, 2 * len(self.rope)))

    def context_kv(self, features: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """features [count, hidden_size], any float dtype and device; rope [count, 2, head_dim], of their positions ->
        keys and values [count, layers, 2, kv_heads, head_dim]."""
        config, count = self.config, len(features)
        kv = self.weights.context_kv(_at_least_min_rows(features.to(self.device, self.dtype)))[:count]
        kv = kv.view(count, config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        keys = F.rms_norm(kv[:, :, 0], (config.head_dim,), None, config.rms_norm_eps) * self.weights.context_key_norm
        rope = rope[:, :, None, None]
        kv[:, :, 0] = apply_rope(keys, rope[:, 0], rope[:, 1])
        return kv

    def hidden(self, ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The blocks' tokens, flat [rows] -> [rows, hidden_size] after the last layer, before the last norm."""
        config, weights = self.config, self.weights
        x = F.embedding(ids, weights.embedding)
        if config.input_embedding_scale != 1.0:
            x = x * config.input_embedding_scale
        for index, layer in enumerate(weights.layers):
            normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
            normed, kernel = self._convolve_input(layer.attention_conv, normed)
            attended = attend(index, layer.qkv(normed).view(len(x), -1, config.head_dim))
            x = self._add_output(layer.attention_conv, kernel, x, layer.output, attended)
            normed = rms_norm(x, layer.post_attention_norm, config.rms_norm_eps)
            normed, kernel = self._convolve_input(layer.mlp_conv, normed)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            x = self._add_output(layer.mlp_conv, kernel, x, layer.down, F.silu(gate) * up)
        return x

    def rotate_queries_and_keys(self, index: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """In place, what stands between the product and attention: norms of the heads and rotations [rows, 1,
        head_dim]."""
        config = self.config
        query_keys = qkv[:, : config.num_attention_heads + config.num_key_value_heads]
        normed = F.rms_norm(query_keys, (config.head_dim,), None, config.rms_norm_eps)
        query_keys.copy_(apply_rope(normed * self.weights.layers[index].query_key_norm, cos, sin))

    def final_norm(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weights.norm, self.config.rms_norm_eps)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size], normed -> [rows, head] fp32."""
        config = self.config
        logits = self.weights.head(_at_least_min_rows(normed))[: len(normed)].float()
        if config.output_multiplier != 1.0:
            logits *= config.output_multiplier
        if config.final_logit_softcapping is not None:
            logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
        return logits

    def selector_projection(self, normed: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size], normed -> [rows, r]; DFlash2 only."""
        assert self.weights.selector
        return self.weights.selector.projection(_at_least_min_rows(normed))[: len(normed)]

    def _convolve_input(self, conv: ConvWeights | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [rows, hidden_size], a sublayer's normed input -> (what enters it, the kernel for its output)."""
        if conv is None:
            return x, None
        before, after = split_kernels(self._in_blocks(conv.kernels(x)), conv.base.shape[1])
        return grouped_conv(self._in_blocks(x), conv.base[0], before).flatten(0, 1), after

    def _add_output(
        self,
        conv: ConvWeights | None,
        kernel: torch.Tensor | None,
        residual: torch.Tensor,
        last: Linear | Int8Linear,
        x: torch.Tensor,
    ) -> torch.Tensor:
        """residual + the sublayer's output, `last` of x, convolved if there is a convolution."""
        if conv is None or kernel is None:
            return last.added_to(residual, x)
        return residual + grouped_conv(self._in_blocks(last(x)), conv.base[1], kernel).flatten(0, 1)

    def _in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, self.config.block_size, x.shape[-1])

    def _rope_rows(self, positions: int) -> torch.Tensor:
        return rope_table(self.config.rope, self.config.head_dim, positions, self.dtype).to(self.device)


def _at_least_min_rows(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, _MIN_ROWS - len(x))) if len(x) < _MIN_ROWS else x
