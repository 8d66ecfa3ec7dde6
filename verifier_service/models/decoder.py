"""The network all targets share: embedding, layers of attention and MLP, final norm, head."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem.checkpoints.weights import AnyLinear
from tandem.kernels.rms_norm import rms_norm
from verifier_service.models.gqa import GroupedQueryAttention
from verifier_service.models.mla import MultiHeadLatentAttention
from verifier_service.models.mlp import Mlp
from verifier_service.models.moe import MixtureOfExperts
from verifier_service.models.target_config import LatentAttention, TargetConfig
from verifier_service.models.target_model import Features, ForwardBatch
from verifier_service.parallel.ranks import Ranks


@dataclass(frozen=True)
class Layer:
    """Residual blocks: each sublayer sees the normalised stream and adds to it."""

    input_norm: torch.Tensor
    attention: GroupedQueryAttention | MultiHeadLatentAttention
    post_norm: torch.Tensor
    mlp: Mlp | MixtureOfExperts


class DecoderModel:
    """The network with its weights, or one rank's part of it: a TargetModel."""

    wants_tables = False

    def __init__(
        self,
        config: TargetConfig,
        embedding: torch.Tensor,
        layers: list[Layer],
        norm: torch.Tensor,
        head: AnyLinear | None,
        head_ranks: Ranks,
        rope: torch.Tensor,
    ):
        """head: rows of it if head_ranks are several; None where another rank computes logits. rope: rope_table's."""
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.layers = config.layers
        self.max_positions = config.max_positions
        self.dtype = embedding.dtype
        self.heads_per_kv_head = layers[0].attention.heads_per_kv_head
        shape = config.attention
        self.value_dim = shape.kv_rank if isinstance(shape, LatentAttention) else shape.head_dim
        self.head_is_split = head_ranks.size > 1
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._head_ranks = head_ranks
        self._rope = rope

    @property
    def routes(self) -> tuple[int, int]:
        """Mixtures of experts, and experts per token: (0, 0) without any."""
        mixture = self.config.mixture
        return (len(mixture.layers), mixture.experts_per_token) if mixture else (0, 0)

    @property
    def routing(self) -> list[torch.Tensor]:
        """Per mixture of experts, in order of the layers: [rows, experts per token] int64, the experts that the real
        rows of the last forward went to, on any rank. Not copied: the next forward makes new ones."""
        return [layer.mlp.routed for layer in self._layers if isinstance(layer.mlp, MixtureOfExperts)]

    @property
    def expert_bytes(self) -> list[int]:
        """Per mixture of experts, in order of the layers: memory of one expert's weights, or of this rank's part."""
        return [layer.mlp.expert_bytes for layer in self._layers if isinstance(layer.mlp, MixtureOfExperts)]

    @property
    def layer_bytes(self) -> int:
        """Memory of the layers' weights held here, routed experts left out: what every step reads."""
        return sum(layer.attention.nbytes + layer.mlp.nbytes for layer in self._layers)

    @property
    def head_bytes(self) -> int:
        """Memory of the head's rows held here."""
        return self._head.nbytes if self._head else 0

    def kv_shape(self, blocks: int, block_tokens: int) -> tuple[int, ...]:
        """Shape of one layer's KV pool."""
        return blocks, block_tokens, *self._layers[0].attention.kv_shape()

    def forward(
        self, batch: ForwardBatch, kv: list[torch.Tensor], tap_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See TargetModel."""
        eps = self.config.eps
        x = F.embedding(batch.token_ids, self._embedding)
        real_rows, padding = len(x) - batch.padding, None
        if batch.tables:
            padding = (torch.arange(len(x), device=x.device) >= batch.tables.first_rows[-1])[:, None]
        cos, sin = self._rope.index_select(0, batch.positions)[:, :, None].unbind(1)
        taps: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self._layers):
            normed = rms_norm(x, layer.input_norm, eps)
            x, normed = layer.attention.added_and_normed(x, normed, (cos, sin), batch, kv[i], layer.post_norm)
            x = layer.mlp.added_to(x, normed, real_rows, padding)
            if i in tap_layers:
                taps[i] = x
        return x, torch.cat([taps[i] for i in tap_layers], dim=-1) if tap_layers else x[:, :0]

    def forward_with_features(self, batch: ForwardBatch, kv: list[torch.Tensor], features: Features) -> torch.Tensor:
        """See TargetModel."""
        assert callable(features.projection)
        hidden, taps = self.forward(batch, kv, features.layers)
        features.pool.index_copy_(0, batch.slots, features.projection(taps))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TargetModel."""
        assert self._head, "rank 0 computes logits"
        return self._head_ranks.gather_columns(self._head(rms_norm(hidden, self._norm, self.config.eps)))
