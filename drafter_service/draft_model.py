"""The DFlash and DFlash2 draft networks: context keys and values from features, and drafts from one forward.

Source: DFlash (arXiv 2602.06036) and its reference code (PyPI `dflash` 0.1.0). A block holds the anchor and
block_size - 1 mask tokens at the positions from the anchor's on; slot i's output proposes the token at slot i's own
position. Committed positions enter as keys and values of their features only: they have no queries and no MLP. DFlash2
convolves the block's slots around each sublayer and lets a selector choose among each slot's candidates by the token
before.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
import torch.nn.functional as F

from drafter_service.block_attention import BlockAttention
from drafter_service.context_kv import ContextKV
from drafter_service.draft_weights import ConvWeights, DraftWeights, LayerWeights, load_weights
from drafter_service.slot_candidates import greedy_blocks, independent_candidates, selected_candidates
from tandem.checkpoints.draft_config import DraftConfig
from tandem.draft_tree import Candidates, Draft, best_chain, build_tree, sample_chain
from tandem.layers.dflash2 import grouped_conv, split_kernels
from tandem.layers.int8_linear import Int8Linear
from tandem.layers.linear import Linear
from tandem.layers.norm import rms_norm
from tandem.layers.rope import apply_rope, rope_table
from tandem.speculation import DraftShape

logger = logging.getLogger(__name__)

_MIN_ROWS = 4
"""Products over fewer rows may take another kernel with other rounding; with these, a row's result does not depend on
what else is in the batch."""

_MAX_CANDIDATES = 32
"""Candidates per slot of a tree. Exact for trees of up to 32 nodes: a node of rank r has r better siblings. In larger
ones what is left out has a probability below 1 / 33 in its own slot, and taking it in costs as much again in top-k."""


@dataclass(frozen=True)
class ContextRows:
    """Features of consecutive positions of one sequence."""

    kv: ContextKV
    start: int
    features: torch.Tensor
    """[count, hidden_size], any float dtype."""


@dataclass(frozen=True)
class BlockRequest:
    """A block to run behind the first `base` positions of a sequence, all of which must be written."""

    kv: ContextKV
    base: int
    anchor: int
    nodes: int
    """Nodes wanted, at least 1. A chain has at most block_size - 1. The block has all its slots whatever this is, as
    in training; only the vocabulary projection is spared."""
    shape: DraftShape = DraftShape.BLOCK


class DraftModel:
    """A loaded draft model. Not thread-safe."""

    def __init__(self, config: DraftConfig, weights: DraftWeights):
        self.config = config
        self._weights = weights
        self._dtype, self._device = weights.embedding.dtype, weights.embedding.device
        self._rope = self._rope_rows(config.max_position_embeddings)
        """[positions, 2, head_dim]"""

    @classmethod
    def load(
        cls, draft_folder: Path, target_folder: Path, dtype: torch.dtype, device: torch.device, int8: bool = False
    ) -> "DraftModel":
        """StartupError names the file and the key or tensor that is wrong. int8: see load_weights."""
        config = DraftConfig.load(draft_folder)
        return cls(config, load_weights(config, draft_folder, target_folder, dtype, device, int8))

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
    def draft(
        self, requests: Sequence[BlockRequest], temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> list[Draft]:
        """One forward over the blocks of all requests, which are of different sequences.

        A block is the chain of the most probable tokens, a tree the most probable prefixes. With a temperature the
        blocks of a DFlash2 model are drawn from its selector's distributions, as the rejection rule min(1, p / q)
        needs it, and log_probs are log q; ValueError for trees and for DFlash, whose blocks are not drawn: slots that
        do not see each other's draws rarely agree.
        """
        if temperature > 0:
            if self.config.dflash2 is None or any(r.shape is DraftShape.TREE for r in requests):
                raise ValueError("temperature: only the blocks of DFlash2 draft models are drawn")
            candidates = self.candidates(requests)
            return [
                sample_chain(c, temperature, torch.rand(len(c.tokens), generator=generator).tolist())
                for c in candidates
            ]
        if self.config.dflash2 is not None:
            return [_draft_from(c, r) for c, r in zip(self.candidates(requests), requests, strict=True)]
        # Blocks need no more than the best token of each row: they come first, so that both kinds are whole slices.
        order = sorted(range(len(requests)), key=lambda i: requests[i].shape is DraftShape.TREE)
        ordered = [requests[i] for i in order]
        logits = self.block_logits(ordered)
        slots = [self._slots(r) for r in ordered]
        blocks = sum(r.shape is DraftShape.BLOCK for r in requests)
        rows = sum(slots[:blocks])
        drafts = []
        if blocks:
            drafts += greedy_blocks(logits[:rows], self._weights.draft_tokens, slots[:blocks])
        if trees := ordered[blocks:]:
            candidates = self._independent_candidates(trees, logits[rows:])
            drafts += [_draft_from(c, r) for c, r in zip(candidates, trees, strict=True)]
        return [draft for _, draft in sorted(zip(order, drafts, strict=True), key=itemgetter(0))]

    @torch.inference_mode()
    def candidates(self, requests: Sequence[BlockRequest]) -> list[Candidates]:
        """What draft chooses from: of each request the first `nodes` slots, all slots if there are fewer.

        DFlash: as many candidates as the largest request has nodes, at most 32. DFlash2: selector_top_k, with the
        distributions of its selector.
        """
        hidden = self._forward(requests)
        logits = self._logits(hidden)
        selector = self._weights.selector
        if selector is None:
            return self._independent_candidates(requests, logits)
        return selected_candidates(
            logits,
            self._weights.draft_tokens,
            [self._slots(r) for r in requests],
            torch.tensor([r.anchor for r in requests], device=self._device),
            selector.projection(_at_least_min_rows(hidden))[: len(hidden)],
            selector,
        )

    @torch.inference_mode()
    def block_logits(self, requests: Sequence[BlockRequest]) -> torch.Tensor:
        """[sum of slots, vocab_size] fp32: of the first `nodes` slots behind each request's anchor, all if there are
        fewer. With a reduced head there is a column for each of its tokens only."""
        return self._logits(self._forward(requests))

    def _independent_candidates(self, requests: Sequence[BlockRequest], logits: torch.Tensor) -> list[Candidates]:
        k = min(max(r.nodes for r in requests), _MAX_CANDIDATES, logits.shape[1])
        return independent_candidates(logits, self._weights.draft_tokens, [self._slots(r) for r in requests], k)

    def _slots(self, request: BlockRequest) -> int:
        return min(request.nodes, self.config.block_size - 1)

    def _forward(self, requests: Sequence[BlockRequest]) -> torch.Tensor:
        """[sum of slots, hidden_size]: the normed output of the slots that are wanted."""
        config, weights, block = self.config, self._weights, self.config.block_size
        self._cover(max(request.base for request in requests) + block)
        ids = torch.full((len(requests), block), config.mask_token_id)
        ids[:, 0] = torch.tensor([request.anchor for request in requests])
        first_positions = torch.tensor([[request.base] for request in requests])
        positions = (first_positions + torch.arange(block)).flatten().to(self._device)
        rope = self._rope[positions]
        cos, sin = rope[:, None, 0], rope[:, None, 1]
        attention = [BlockAttention(r.kv, r.base, config, self._device) for r in requests]

        x = F.embedding(ids.flatten().to(self._device), weights.embedding)
        if config.input_embedding_scale != 1.0:
            x = x * config.input_embedding_scale
        for index, layer in enumerate(weights.layers):
            normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
            normed, kernel = self._convolve_input(layer.attention_conv, normed)
            attended = self._attend(index, layer, normed, cos, sin, attention)
            x = self._add_output(layer.attention_conv, kernel, x, layer.output, attended)
            normed = rms_norm(x, layer.post_attention_norm, config.rms_norm_eps)
            normed, kernel = self._convolve_input(layer.mlp_conv, normed)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            x = self._add_output(layer.mlp_conv, kernel, x, layer.down, F.silu(gate) * up)
        wanted = [i * block + slot for i, r in enumerate(requests) for slot in range(1, self._slots(r) + 1)]
        return rms_norm(x[torch.tensor(wanted).to(self._device)], weights.norm, config.rms_norm_eps)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        config = self.config
        logits = self._weights.head(_at_least_min_rows(hidden))[: len(hidden)].float()
        if config.output_multiplier != 1.0:
            logits *= config.output_multiplier
        if config.final_logit_softcapping is not None:
            logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
        return logits

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

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: list[BlockAttention],
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


def _draft_from(candidates: Candidates, request: BlockRequest) -> Draft:
    build = build_tree if request.shape is DraftShape.TREE else best_chain
    return build(candidates, request.nodes)
