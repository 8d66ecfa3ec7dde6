"""From a checkpoint folder to a target, or to one rank's part of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.checkpoints.weights import AnyLinear, WeightReader
from tandem.errors import StartupError
from tandem.layers.linear import Linear
from tandem.layers.rope import rope_table
from tandem.native.choice import takes_native
from verifier_service.models.architectures import read_config
from verifier_service.models.decoder import DecoderModel, Layer
from verifier_service.models.gqa import GroupedQueryAttention
from verifier_service.models.mla import MultiHeadLatentAttention
from verifier_service.models.mlp import Mlp
from verifier_service.models.moe import MixtureOfExperts
from verifier_service.models.native_decoder import NativeDecoder, load_native, why_not_native
from verifier_service.models.target_config import PROJECTIONS, LatentAttention, Mixture, TargetConfig
from verifier_service.parallel.ranks import ALONE, OneRank, Parallel

Placement = Mapping[int, Sequence[Sequence[int]]]
"""Per layer the ids of the experts that each rank holds; layers it lacks are split evenly in order of ids."""

_NOT_TEXT = ("vision_tower.", "mm_projector.")


def load_model(
    folder: CheckpointFolder,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel = ALONE,
    placement: Placement | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> DecoderModel:
    """The target in torch, on any device. progress: told name and bytes of each part that is read.

    StartupError names the file and the key or tensor that is missing, left over, of another shape or not supported, or
    what cannot be split over the ranks.
    """
    config = read_config(folder)
    reader = WeightReader(folder, dtype, device, folder.text_prefix, progress)
    if folder.text_prefix:
        folder.skip(*_NOT_TEXT)
    hidden = config.hidden_size
    embedding = reader.tensor("model.embed_tokens.weight", (config.vocab_size, hidden))
    layers = [_layer(config, i, reader, f"model.layers.{i}.", parallel, placement or {}) for i in range(config.layers)]
    reader.skip(*(f"model.layers.{config.layers + i}." for i in range(config.extra_layers)))
    norm = reader.tensor("model.norm.weight", (hidden,))
    head = _head(config, reader, embedding, parallel)
    reader.check_all_read()
    in_pairs = isinstance(config.attention, LatentAttention) and config.attention.interleaved_rope
    rope = rope_table(config.rope, config.attention.rope_dim, config.max_positions, dtype, in_pairs)
    ranks = parallel.ranks if parallel.attention.count > 1 else OneRank()
    return DecoderModel(config, embedding, layers, norm, head, ranks, rope.to(device))


def load_served_model(
    folder: CheckpointFolder,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Literal["auto", "native", "torch"],
    parallel: Parallel = ALONE,
    placement: Placement | None = None,
    progress: Callable[[str, int], None] | None = None,
    key: str = "verifier.cpu_kernels",
) -> DecoderModel | NativeDecoder:
    """On a CPU by `kernels`, as load_cpu_model says, or in torch; elsewhere in torch."""
    if device.type != "cpu" or kernels == "torch":
        return load_model(folder, dtype, device, parallel, placement, progress)
    return load_cpu_model(folder, dtype, kernels, parallel, placement, progress, key)


def load_cpu_model(
    folder: CheckpointFolder,
    dtype: torch.dtype,
    kernels: Literal["auto", "native"],
    parallel: Parallel = ALONE,
    placement: Placement | None = None,
    progress: Callable[[str, int], None] | None = None,
    key: str = "verifier.cpu_kernels",
) -> DecoderModel | NativeDecoder:
    """As load_model on a CPU, on the native path if the target and the machine allow it, with as many threads as torch
    has. Otherwise auto takes torch, and the log says why; native is a StartupError, naming the config's key."""
    config = read_config(folder)
    reason = why_not_native(config, folder, dtype, parallel)
    if takes_native(kernels, reason, "target", key):
        reader = WeightReader(folder, dtype, torch.device("cpu"), folder.text_prefix, progress)
        return load_native(config, folder, reader, torch.get_num_threads())
    return load_model(folder, dtype, torch.device("cpu"), parallel, placement, progress)


def _layer(
    config: TargetConfig, index: int, reader: WeightReader, prefix: str, parallel: Parallel, placement: Placement
) -> Layer:
    hidden, shape = config.hidden_size, config.attention
    attention: GroupedQueryAttention | MultiHeadLatentAttention
    if isinstance(shape, LatentAttention):
        attention = MultiHeadLatentAttention(config, shape, reader, f"{prefix}self_attn.", parallel)
    else:
        attention = GroupedQueryAttention(config, shape, reader, f"{prefix}self_attn.", parallel)
    mlp: Mlp | MixtureOfExperts
    mixture = config.mixture
    if mixture and index in mixture.layers:
        block = f"{prefix}{mixture.names.block}."
        held = _held(mixture, index, parallel, placement)
        mlp = MixtureOfExperts(mixture, hidden, reader, block, held, parallel)
        reader.skip(*(f"{block}experts.{e}." for e in set(range(mixture.experts)).difference(held)))
    else:
        ranks = parallel.ranks if parallel.attention.count > 1 else OneRank()
        mlp = Mlp(reader, f"{prefix}mlp.", hidden, config.intermediate_size, PROJECTIONS, parallel.attention, ranks)
    return Layer(
        input_norm=reader.tensor(f"{prefix}input_layernorm.weight", (hidden,)),
        attention=attention,
        post_norm=reader.tensor(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        mlp=mlp,
    )


def _held(mixture: Mixture, layer: int, parallel: Parallel, placement: Placement) -> list[int]:
    """Ids of the experts that this rank holds, ascending."""
    everyone = range(mixture.experts)
    shard = parallel.experts
    if parallel.cut_experts:
        if placement:
            raise StartupError("a placement of experts: every rank holds a part of every expert when they are cut")
        return list(everyone)
    if layer not in placement:
        return list(shard.of(mixture.experts, "experts"))
    ranks = placement[layer]
    if len(ranks) != shard.count or sorted(e for rank in ranks for e in rank) != list(everyone):
        raise StartupError(
            f"placement of experts, layer {layer}: must give each of {mixture.experts} experts to one of "
            f"{shard.count} ranks"
        )
    return sorted(ranks[shard.index])


def _head(config: TargetConfig, reader: WeightReader, embedding: torch.Tensor, parallel: Parallel) -> AnyLinear | None:
    """Rank 0's, or every rank's rows if attention is split too."""
    shard = parallel.attention
    rows = shard.of(config.vocab_size, "vocab_size")
    reader.skip("lm_head.weight")
    if shard.count == 1 and parallel.ranks.rank > 0:
        return None
    if config.tied_head:
        return Linear(embedding[rows.start : rows.stop])
    return reader.linear([("lm_head", config.vocab_size)], config.hidden_size, shard)
