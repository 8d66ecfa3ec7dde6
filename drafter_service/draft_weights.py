"""Weights of a DFlash or DFlash2 draft model, laid out for drafting; embedding and head come from the target."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.checkpoints.draft_config import DraftConfig
from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError
from tandem.layers.int8_linear import Int8Linear
from tandem.layers.linear import Linear

_VERIFIERS_TENSORS = ("fc.weight", "hidden_norm.weight")
"""Features arrive with these applied."""


@dataclass(frozen=True)
class ConvWeights:
    """DFlash2's convolutions around one sublayer. T: taps."""

    base: torch.Tensor
    """[2, T, H]: for the sublayer's input, for its output."""
    kernels: Linear
    """H -> 2 x T x groups: the dynamic kernels."""


@dataclass(frozen=True)
class SelectorWeights:
    """DFlash2's candidate selector. V: vocabulary, r: rank."""

    top_k: int
    predecessors: torch.Tensor
    """[V, r]"""
    successors: torch.Tensor
    """[V, r]"""
    projection: Linear
    """H -> r"""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. H: hidden size, I: intermediate size, D: head dim, N and M: heads and key-value heads."""

    input_norm: torch.Tensor
    """[H]"""
    qkv: Linear | Int8Linear
    """H -> (N + 2M) x D: queries, keys, values."""
    query_key_norm: torch.Tensor
    """[N + M, D]: q_norm for each query head, then k_norm for each key head."""
    output: Linear | Int8Linear
    """N x D -> H"""
    post_attention_norm: torch.Tensor
    """[H]"""
    gate_up: Linear | Int8Linear
    """H -> 2I"""
    down: Linear | Int8Linear
    """I -> H"""
    attention_conv: ConvWeights | None
    mlp_conv: ConvWeights | None
    """DFlash2 only."""


@dataclass(frozen=True)
class DraftWeights:
    """The whole network. V: vocabulary, L: layers."""

    layers: tuple[LayerWeights, ...]
    context_kv: Linear
    """H -> L x 2 x M x D: keys and values of all layers, for features. A second copy of those rows of every qkv, so
    that a context takes one product."""
    context_key_norm: torch.Tensor
    """[L, 1, D]"""
    norm: torch.Tensor
    """[H]"""
    embedding: torch.Tensor
    """[V, H], the target's raw rows."""
    head: Linear | Int8Linear
    """H -> V, the target's; with draft_tokens only the rows of those."""
    draft_tokens: torch.Tensor | None
    """[draft vocabulary] int64, ascending: the token of each head row; None if the head has all rows in order."""
    selector: SelectorWeights | None
    """DFlash2 only."""


def load_weights(
    config: DraftConfig,
    draft_folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    int8: bool = False,
) -> DraftWeights:
    """Every tensor is checked by name and shape, and none may be left over; StartupError names file and tensor.

    int8: the blocks' linears and the head multiply in 8-bit integers; what goes into the context stays in dtype."""
    linear = Int8Linear if int8 else Linear
    folder = CheckpointFolder(draft_folder)
    embedding, head = _target_rows(config, draft_folder, CheckpointFolder(target_folder), dtype, device)
    draft_tokens = _draft_tokens(config, folder)
    if draft_tokens is not None:
        draft_tokens = draft_tokens.to(device)
        head = head[draft_tokens]

    def read(name: str, *shape: int) -> torch.Tensor:
        return folder.tensor(name, shape, dtype).to(device)

    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layers, context_weights, context_biases, key_norms = [], [], [], []
    for i in range(config.num_hidden_layers):
        name = f"layers.{i}"
        widths = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        weights = [read(f"{name}.self_attn.{part}.weight", width, hidden) for part, width in widths.items()]
        biases, output_bias = [], None
        if config.attention_bias:
            biases = [read(f"{name}.self_attn.{part}.bias", width) for part, width in widths.items()]
            output_bias = read(f"{name}.self_attn.o_proj.bias", hidden)
        query_norm = read(f"{name}.self_attn.q_norm.weight", head_dim)
        key_norm = read(f"{name}.self_attn.k_norm.weight", head_dim)
        gate, up = (read(f"{name}.mlp.{part}_proj.weight", inner, hidden) for part in ("gate", "up"))
        layers.append(
            LayerWeights(
                input_norm=read(f"{name}.input_layernorm.weight", hidden),
                qkv=linear(torch.cat(weights), torch.cat(biases) if biases else None),
                query_key_norm=torch.cat((query_norm.expand(heads, -1), key_norm.expand(kv_heads, -1))),
                output=linear(read(f"{name}.self_attn.o_proj.weight", hidden, heads * head_dim), output_bias),
                post_attention_norm=read(f"{name}.post_attention_layernorm.weight", hidden),
                gate_up=linear(torch.cat((gate, up))),
                down=linear(read(f"{name}.mlp.down_proj.weight", hidden, inner)),
                attention_conv=_conv(config, f"{name}.attention_conv", read),
                mlp_conv=_conv(config, f"{name}.mlp_conv", read),
            )
        )
        context_weights += weights[1:]
        context_biases += biases[1:]
        key_norms.append(key_norm)
    norm = read("norm.weight", hidden)
    selector = _selector(config, read)
    folder.check_all_read(ignore_suffixes=_VERIFIERS_TENSORS)
    return DraftWeights(
        layers=tuple(layers),
        context_kv=Linear(torch.cat(context_weights), torch.cat(context_biases) if context_biases else None),
        context_key_norm=torch.stack(key_norms)[:, None],
        norm=norm,
        embedding=embedding,
        head=linear(head),
        draft_tokens=draft_tokens,
        selector=selector,
    )


def _conv(config: DraftConfig, name: str, read: Callable[..., torch.Tensor]) -> ConvWeights | None:
    if config.dflash2 is None:
        return None
    hidden, taps, size = config.hidden_size, config.dflash2.conv_kernel_size, config.dflash2.conv_group_size
    kernels = read(f"{name}.kernel_projection.weight", 2 * taps * hidden // size, hidden)
    return ConvWeights(read(f"{name}.base_kernel", 2, taps, hidden), Linear(kernels))


def _selector(config: DraftConfig, read: Callable[..., torch.Tensor]) -> SelectorWeights | None:
    if config.dflash2 is None:
        return None
    vocab, rank = config.vocab_size, config.dflash2.selector_rank
    return SelectorWeights(
        top_k=config.dflash2.selector_top_k,
        predecessors=read("candidate_selector.predecessor_codebook", vocab, rank),
        successors=read("candidate_selector.successor_codebook", vocab, rank),
        projection=Linear(read("candidate_selector.hidden_projection.weight", rank, config.hidden_size)),
    )


def _target_rows(
    config: DraftConfig, draft_folder: Path, target: CheckpointFolder, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    for key, target_key, value in (
        ("vocab_size", "vocab_size", config.vocab_size),
        ("hidden_size", "hidden_size", config.hidden_size),
        ("num_target_layers", "num_hidden_layers", config.num_target_layers),
    ):
        targets = target.text_config.get(target_key)
        if value is not None and value != targets:
            raise StartupError(
                f"{draft_folder / 'config.json'}: {key}: is {value}, but the target has {target_key} {targets} "
                f"({target.path / 'config.json'}): this draft model belongs to another target"
            )
    shape = (config.vocab_size, config.hidden_size)
    head = f"{target.text_prefix}lm_head.weight"
    embedding = target.tensor(f"{target.text_prefix}model.embed_tokens.weight", shape, dtype).to(device)
    if target.text_config.get("tie_word_embeddings", head not in target):
        return embedding, embedding
    return embedding, target.tensor(head, shape, dtype).to(device)


def _draft_tokens(config: DraftConfig, folder: CheckpointFolder) -> torch.Tensor | None:
    """Tokens of a reduced head, from `d2t` as published draft models with a reduced vocabulary have it: row i proposes
    token i + d2t[i]."""
    if config.draft_vocab_size is None:
        return None
    size = config.draft_vocab_size
    tokens = folder.tensor("d2t", (size,), torch.int64) + torch.arange(size)
    if tokens[0] < 0 or tokens[-1] >= config.vocab_size or bool((tokens.diff() <= 0).any()):
        raise StartupError(f"{folder.path}: tensor d2t must list ascending tokens below {config.vocab_size}")
    return tokens
