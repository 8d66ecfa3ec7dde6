"""Multi-head latent attention: DeepSeek-V3 (arXiv 2412.19437), Kimi K2.

Keys and values are kept as one latent per token, which all heads share, and never expanded: each head's key projection
is absorbed into its query and its value projection follows the attention. Prompts take this form too, so that a row has
the same bits whether it was decoded, verified or prefilled.
"""

import torch

from tandem.checkpoints.weights import WeightReader
from tandem.kernels.rms_norm import rms_norm
from tandem.kernels.rope import keep_latents, rope
from verifier_service.models.reduction import added_and_normed
from verifier_service.models.target_config import LatentAttention, TargetConfig
from verifier_service.models.target_model import ForwardBatch
from verifier_service.parallel.ranks import OneRank, Parallel

_EPS = 1e-6
"""Of the norms inside; config.json's is for those around."""


class MultiHeadLatentAttention:
    """One layer's attention, or the heads of it that a rank holds. Every rank keeps the latents of all tokens."""

    def __init__(
        self, target: TargetConfig, shape: LatentAttention, reader: WeightReader, prefix: str, parallel: Parallel
    ):
        shard, hidden, self._shape = parallel.attention, target.hidden_size, shape
        self._heads, self._eps = len(shard.of(target.heads, "num_attention_heads")), target.eps
        self._ranks = parallel.ranks if shard.count > 1 else OneRank()
        query_size = target.heads * (shape.nope_dim + shape.rope_dim)
        squeezed = [(f"{prefix}kv_a_proj_with_mqa", shape.kv_rank + shape.rope_dim)]
        if shape.q_rank:
            squeezed.insert(0, (f"{prefix}q_a_proj", shape.q_rank))
            self._query_norm = reader.tensor(f"{prefix}q_a_layernorm.weight", (shape.q_rank,))
            self._query = reader.linear([(f"{prefix}q_b_proj", query_size)], shape.q_rank, shard)
        else:
            self._query = reader.linear([(f"{prefix}q_proj", query_size)], hidden, shard)
        self._squeeze = reader.linear(squeezed, hidden)
        self._latent_norm = reader.tensor(f"{prefix}kv_a_layernorm.weight", (shape.kv_rank,))
        rows = target.heads * (shape.nope_dim + shape.value_dim)
        expand = reader.dense(f"{prefix}kv_b_proj", (rows, shape.kv_rank), shard, 0).view(
            self._heads, -1, shape.kv_rank
        )
        self._absorb = expand[:, : shape.nope_dim].contiguous()
        """[heads, nope, latent]"""
        self._values = expand[:, shape.nope_dim :].transpose(1, 2).contiguous()
        """[heads, latent, value]"""
        self._out = reader.linear([(f"{prefix}o_proj", hidden)], target.heads * shape.value_dim, shard, dim=1)
        weights = (self._query, self._squeeze, self._absorb, self._values, self._out)
        self.nbytes = sum(weight.nbytes for weight in weights)
        """Memory the weights held here take."""

    @property
    def heads_per_kv_head(self) -> int:
        return self._heads

    def kv_shape(self) -> tuple[int, int, int]:
        """Of a token: the latent, then the rotated part of the key."""
        return 1, 1, self._shape.kv_rank + self._shape.rope_dim

    def added_and_normed(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        kv: torch.Tensor,
        norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + attention of x [rows, hidden], over all ranks, and its RMSNorm; writes the rows' latents into kv.

        norm [hidden]: the RMSNorm's weight. rotation: cos and sin of the rows, [rows, 1, rope_dim].
        """
        s, rows = self._shape, len(x)
        squeezed = self._squeeze(x)
        unkept = squeezed[:, -s.kv_rank - s.rope_dim :]
        keep_latents(unkept, self._latent_norm, _EPS, rotation, s.interleaved_rope, kv, batch.slots)

        query = self._query(rms_norm(squeezed[:, : s.q_rank], self._query_norm, _EPS) if s.q_rank else x)
        q_nope, q_rope = query.view(rows, self._heads, -1).split([s.nope_dim, s.rope_dim], dim=-1)
        absorbed = torch.bmm(q_nope.transpose(0, 1), self._absorb).transpose(0, 1)
        query = torch.cat((absorbed, rope(q_rope, rotation, s.interleaved_rope)), dim=-1)
        attended = batch.attention(query, kv, s.scale).view(rows, self._heads, -1)[..., : s.kv_rank]
        values = torch.bmm(attended.transpose(0, 1), self._values).transpose(0, 1)
        return added_and_normed(residual, self._out, values.reshape(rows, -1), self._ranks, norm, self._eps)
