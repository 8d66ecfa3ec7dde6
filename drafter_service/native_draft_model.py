"""Drafts of a DFlash draft model on the CPU's own path: a forward over all blocks is one call into C++."""

import logging
from collections.abc import Sequence

import torch

from drafter_service.context_kv import ContextKV
from drafter_service.draft_model import MAX_CANDIDATES, BlockRequest, ContextRows, draft_from
from drafter_service.draft_network import DraftNetwork
from drafter_service.draft_weights import ConvWeights, SelectorWeights
from tandem.checkpoints.draft_config import DraftConfig
from tandem.draft_tree import Candidates, Draft
from tandem.layers.int8_linear import Int8Linear
from tandem.layers.linear import Linear
from tandem.native.block_network import BlockNetwork, Rows, Selector
from tandem.native.library import BLOCK, LayerWeights, Matrix, Sizes, load, rotations, why_not_here
from tandem.speculation import DraftShape

logger = logging.getLogger(__name__)


def why_not_native(config: DraftConfig, dtype: torch.dtype) -> str | None:
    """What keeps this draft model from the native path; None: nothing. Builds the library if that was not done yet."""
    for wrong, reason in (
        (any(layer.causal or layer.window is not None for layer in config.layers), "it has causal or sliding layers"),
        (config.attention_bias, "its attention has biases"),
        (config.input_embedding_scale != 1.0, "it scales embeddings"),
        (config.output_multiplier != 1.0 or config.final_logit_softcapping is not None, "it scales or caps logits"),
        (dtype != torch.bfloat16, "its dtype is not bfloat16"),
    ):
        if wrong:
            return reason
    rank = config.dflash2.selector_rank if config.dflash2 else 0
    if rank % BLOCK:
        return f"selector_rank, {rank}, is not a multiple of {BLOCK}"
    return _sizes(config).misfit("the head's vocabulary") or why_not_here()


class NativeDraftModel:
    """A loaded draft model. Not thread-safe.

    A block has no more masks than nodes are wanted: blocks may be run shorter than trained, and what a draft costs
    here goes with its rows.

    The residual stream, norms, softmax and all sums are fp32. Keys, values and what goes into a bf16 product are
    rounded to bf16, what goes into an 8-bit product to 8 bits per group of 32. A block's bits do not depend on the
    blocks beside it or on the number of threads.
    """

    def __init__(self, network: DraftNetwork, int8: bool, threads: int):
        """network: one that why_not_native has nothing against, loaded without int8; its layers are copied. int8: all
        matrices, those of the context too, in 8 bits per group of 32 columns; but not DFlash2's own, which are small
        and cost the most accuracy there."""
        self.config = config = network.config
        weights = network.weights
        self._draft_tokens = weights.draft_tokens
        self._warned = False
        self._blocks = BlockNetwork(
            load(),
            _sizes(config),
            [_layer(network, index, int8) for index in range(config.num_hidden_layers)],
            Matrix.of(load(), _stored(weights.head), int8),
            weights.draft_tokens,
            _selector(weights.selector) if weights.selector else None,
            weights.norm.float(),
            weights.embedding.contiguous(),
            config.mask_token_id,
            threads,
        )
        self._set_rope(config.max_position_embeddings)

    def new_context(self) -> ContextKV:
        """Room for one sequence's keys and values."""
        config = self.config
        position = (2, config.num_key_value_heads, config.head_dim)
        return ContextKV((config.num_hidden_layers,), position, torch.bfloat16, torch.device("cpu"))

    def has_room(self, positions: int) -> bool:
        """Whether reserve would succeed for a new context."""
        return True

    def reserve(self, kv: ContextKV, positions: int) -> bool:
        """Make room for so many positions and a block behind them."""
        kv.reserve(positions + self.config.block_size)
        return True

    def write_context(self, contexts: Sequence[ContextRows[ContextKV]]) -> None:
        """Compute and store the keys and values of features; each context has at least one row. Where a position comes
        twice either row may stay."""
        ends = [c.start + len(c.features) for c in contexts]
        self._cover(max(ends))
        for context, end in zip(contexts, ends, strict=True):
            context.kv.reserve(end)
        features = [c.features.to(torch.bfloat16).contiguous() for c in contexts]
        self._blocks.write(
            [Rows(c.kv.reserve(0), c.start, len(f), features=f) for c, f in zip(contexts, features, strict=True)]
        )

    def draft(self, requests: Sequence[BlockRequest[ContextKV]]) -> list[Draft]:
        """One forward over the blocks of all requests, which are of different sequences: the chain of the most probable
        tokens, or the most probable prefixes."""
        if self.config.dflash2:
            k = self.config.dflash2.selector_top_k
        else:
            trees = [r.nodes for r in requests if r.shape is DraftShape.TREE]
            k = min(max(trees, default=1), MAX_CANDIDATES, self._blocks.head)
        best = self._blocks.draft(self._rows(requests), k)
        columns = best.columns.long()
        tokens = (columns if self._draft_tokens is None else self._draft_tokens[columns]).tolist()
        log_probs = (best.log_probs[:, None] if best.scores is None else best.scores).tolist()
        drafts, end = [], 0
        for request in requests:
            start, end = end, end + self._slots(request)
            candidates = Candidates(tokens[start:end], [log_probs[start][:1], *log_probs[start + 1 : end]])
            drafts.append(draft_from(candidates, request.nodes, request.shape))
        return drafts

    def block_logits(self, requests: Sequence[BlockRequest[ContextKV]]) -> torch.Tensor:
        """See DraftModel.block_logits."""
        return self._blocks.logits(self._rows(requests))

    def _rows(self, requests: Sequence[BlockRequest[ContextKV]]) -> list[Rows]:
        block = self.config.block_size
        self._cover(max(r.base for r in requests) + block)
        return [Rows(r.kv.reserve(r.base + block), r.base, self._slots(r), r.anchor) for r in requests]

    def _slots(self, request: BlockRequest[ContextKV]) -> int:
        return min(request.nodes, self.config.block_size - 1)

    def _cover(self, positions: int) -> None:
        longest = self.config.max_position_embeddings
        if positions > longest and not self._warned:
            logger.warning("a sequence passes the draft model's %d positions: drafts may be poor", longest)
            self._warned = True
        if positions > self._blocks.positions:
            self._set_rope(max(positions, 2 * self._blocks.positions))

    def _set_rope(self, positions: int) -> None:
        self._blocks.set_rope(rotations(self.config.rope, self.config.head_dim, positions))


def _sizes(config: DraftConfig) -> Sizes:
    convs = config.dflash2
    return Sizes(
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.draft_vocab_size or config.vocab_size,
        config.rms_norm_eps,
        *((convs.conv_kernel_size, convs.conv_group_size) if convs else ()),
    )


def _layer(network: DraftNetwork, index: int, int8: bool) -> LayerWeights:
    config, layer = network.config, network.weights.layers[index]
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = _stored(layer.qkv).split((heads * dim, kv_heads * dim, kv_heads * dim))
    gate, up = _stored(layer.gate_up).chunk(2)
    around_attention, around_mlp = _conv(layer.attention_conv), _conv(layer.mlp_conv)
    return LayerWeights(
        q=Matrix.of(load(), q, int8),
        k=Matrix.of(load(), k, int8),
        v=Matrix.of(load(), v, int8),
        o=Matrix.of(load(), _stored(layer.output), int8),
        gate=Matrix.of(load(), gate, int8),
        up=Matrix.of(load(), up, int8),
        down=Matrix.of(load(), _stored(layer.down), int8),
        input_norm=layer.input_norm.float(),
        post_norm=layer.post_attention_norm.float(),
        q_norm=layer.query_key_norm[0].float(),
        k_norm=layer.query_key_norm[-1].float(),
        attention_conv_kernels=around_attention[0],
        attention_conv_base=around_attention[1],
        mlp_conv_kernels=around_mlp[0],
        mlp_conv_base=around_mlp[1],
    )


def _selector(selector: SelectorWeights) -> Selector:
    projection = Matrix(load(), "bf16", _stored(selector.projection))
    return Selector(projection, selector.predecessors.contiguous(), selector.successors.contiguous())


def _conv(conv: ConvWeights | None) -> tuple[Matrix, torch.Tensor] | tuple[None, None]:
    if conv is None:
        return None, None
    return Matrix(load(), "bf16", _stored(conv.kernels)), conv.base.float().contiguous()


def _stored(linear: Linear | Int8Linear) -> torch.Tensor:
    assert isinstance(linear, Linear)
    return linear.stored[0]
