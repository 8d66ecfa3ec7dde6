"""A dense decoder on the CPU's own path: every step is one call into C++ (tandem/native)."""

import torch

from tandem.checkpoints.folder import CheckpointFolder
from tandem.checkpoints.gguf_blocks import METHOD as GGUF_BLOCKS
from tandem.checkpoints.weights import WeightReader
from tandem.native.library import Decoder, LayerWeights, Matrix, Projection, Sizes, load, rotations, why_not_here
from verifier_service.models.target_config import GroupedAttention, TargetConfig
from verifier_service.models.target_model import Features, ForwardBatch
from verifier_service.parallel.ranks import Parallel


class NativeDecoder:
    """The network with its weights: a TargetModel.

    The residual stream, norms, softmax and all sums are in fp32; keys, values and what goes into a bf16 product are
    rounded to bf16, what goes into a product of blocks to 8 bits per group of 32, as llama.cpp does. A row's bits do
    not depend on the rows beside it, on the number of threads or on whether it stands in a tree.
    """

    wants_tables = True
    head_is_split = False

    def __init__(self, config: TargetConfig, decoder: Decoder, layer_bytes: int, head_bytes: int):
        """layer_bytes, head_bytes: memory of the weights."""
        shape = config.attention
        assert isinstance(shape, GroupedAttention)
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.layers = config.layers
        self.max_positions = config.max_positions
        self.dtype = torch.bfloat16
        self.heads_per_kv_head = config.heads // shape.kv_heads
        self.value_dim = shape.head_dim
        self.routes = (0, 0)
        self.routing: list[torch.Tensor] = []
        self.expert_bytes: list[int] = []
        self.layer_bytes = layer_bytes
        self.head_bytes = head_bytes
        self._decoder = decoder
        self._kv_heads = shape.kv_heads

    def kv_shape(self, blocks: int, block_tokens: int) -> tuple[int, ...]:
        """Shape of one layer's KV pool."""
        return blocks, block_tokens, 2, self._kv_heads, self.value_dim

    def forward(
        self, batch: ForwardBatch, kv: list[torch.Tensor], tap_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See TargetModel. The residual stream is fp32."""
        assert batch.tables
        return self._decoder.forward(batch.token_ids, batch.positions, batch.slots, batch.tables, kv, tap_layers)

    def forward_with_features(self, batch: ForwardBatch, kv: list[torch.Tensor], features: Features) -> torch.Tensor:
        """See TargetModel. The projection is one of projection()'s."""
        assert batch.tables
        assert isinstance(features.projection, Projection)
        rows = batch.token_ids, batch.positions, batch.slots, batch.tables
        return self._decoder.forward(*rows, kv, features.layers, features.projection, features.pool)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TargetModel. Logits are fp32."""
        return self._decoder.logits(hidden)

    def projection(self, weight: torch.Tensor, norm: torch.Tensor, eps: float, int8: bool = False) -> Projection:
        """For forward_with_features; weight [out, taps * hidden] and norm are bf16. int8: the products are of 8-bit
        integers, as those of a draft model in int8 are."""
        matrices = [Matrix.of(load(), part, int8) for part in weight.split(self.hidden_size, dim=1)]
        return Projection(matrices, norm.float(), eps)

    def seconds(self) -> dict[str, float]:
        """Since the start, by what they were spent on: linears, attention, other, head."""
        return self._decoder.seconds()


def why_not_native(
    config: TargetConfig, folder: CheckpointFolder, dtype: torch.dtype, parallel: Parallel
) -> str | None:
    """What keeps this target from the native path; None: nothing. Builds the library if that was not done yet."""
    shape = config.attention
    if not isinstance(shape, GroupedAttention) or config.mixture:
        return "the target is no dense decoder with grouped-query attention"
    if parallel.ranks.size > 1:
        return "the target is split over ranks"
    if dtype != torch.bfloat16:
        return "its dtype is not bfloat16"
    if folder.quantization not in (None, GGUF_BLOCKS):
        return f"its weights are stored as {folder.quantization}"
    return _sizes(config, shape).misfit("vocab_size") or why_not_here()


def load_native(config: TargetConfig, folder: CheckpointFolder, reader: WeightReader, threads: int) -> NativeDecoder:
    """Of a target that why_not_native() has nothing against. StartupError as load_model's."""
    shape = config.attention
    assert isinstance(shape, GroupedAttention)
    weights = _Weights(folder, reader, config)
    layers = [_layer(config, shape, weights, f"model.layers.{i}.") for i in range(config.layers)]
    embedding = weights.matrix("model.embed_tokens", config.vocab_size, config.hidden_size)
    head = embedding if config.tied_head else weights.matrix("lm_head", config.vocab_size, config.hidden_size)
    norm = weights.norm("model.norm", config.hidden_size)
    reader.skip("lm_head.weight")
    reader.check_all_read()
    rope = rotations(config.rope, shape.head_dim, config.max_positions)
    decoder = Decoder(load(), _sizes(config, shape), layers, embedding, head, norm, rope, threads)
    in_layers = sum(m.nbytes for layer in layers for m in vars(layer).values() if isinstance(m, Matrix))
    return NativeDecoder(config, decoder, in_layers, head.nbytes)


def _sizes(config: TargetConfig, shape: GroupedAttention) -> Sizes:
    return Sizes(
        config.layers,
        config.hidden_size,
        config.intermediate_size,
        config.heads,
        shape.kv_heads,
        shape.head_dim,
        config.vocab_size,
        config.eps,
    )


class _Weights:
    def __init__(self, folder: CheckpointFolder, reader: WeightReader, config: TargetConfig):
        self._folder = folder
        self._reader = reader
        self._library = load()

    def matrix(self, name: str, out: int, columns: int) -> Matrix:
        blocks = self._reader.blocks(f"{name}.weight", (out, columns))
        if blocks:
            matrix = Matrix(self._library, blocks.form, blocks.values, blocks.scales, blocks.minima)
        else:
            matrix = Matrix(self._library, "bf16", self._reader.dense(name, (out, columns)))
        self._folder.release()
        return matrix

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self._reader.tensor(f"{name}.weight", (size,), dtype=torch.float32)


def _layer(config: TargetConfig, shape: GroupedAttention, weights: _Weights, prefix: str) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return LayerWeights(
        q=weights.matrix(f"{attention}q_proj", q, hidden),
        k=weights.matrix(f"{attention}k_proj", kv, hidden),
        v=weights.matrix(f"{attention}v_proj", kv, hidden),
        o=weights.matrix(f"{attention}o_proj", hidden, q),
        gate=weights.matrix(f"{mlp}gate_proj", inner, hidden),
        up=weights.matrix(f"{mlp}up_proj", inner, hidden),
        down=weights.matrix(f"{mlp}down_proj", hidden, inner),
        input_norm=weights.norm(f"{prefix}input_layernorm", hidden),
        post_norm=weights.norm(f"{prefix}post_attention_layernorm", hidden),
        q_norm=weights.norm(f"{attention}q_norm", shape.head_dim) if shape.qk_norm else None,
        k_norm=weights.norm(f"{attention}k_norm", shape.head_dim) if shape.qk_norm else None,
    )
