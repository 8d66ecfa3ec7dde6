"""Grouped-query attention: Llama, Qwen3, Mixtral."""

import torch

from tandem.checkpoints.shard import Shard
from tandem.checkpoints.weights import WeightReader
from tandem.kernels.rope import keep_keys_and_values
from verifier_service.models.reduction import added_and_normed
from verifier_service.models.target_config import GroupedAttention, TargetConfig
from verifier_service.models.target_model import ForwardBatch
from verifier_service.parallel.ranks import OneRank, Parallel


class GroupedQueryAttention:
    """One layer's attention, or the heads of it that a rank holds."""

    def __init__(
        self, target: TargetConfig, shape: GroupedAttention, reader: WeightReader, prefix: str, parallel: Parallel
    ):
        shard, self._dim, self._eps = parallel.attention, shape.head_dim, target.eps
        kv_shard = _kv_shard(shard, shape.kv_heads)
        self._heads = len(shard.of(target.heads, "num_attention_heads"))
        self._kv_heads = len(kv_shard.of(shape.kv_heads, "num_key_value_heads"))
        self._scale = shape.head_dim**-0.5
        self._ranks = parallel.ranks if shard.count > 1 else OneRank()
        q = (f"{prefix}q_proj", target.heads * self._dim)
        kv = [(f"{prefix}{n}_proj", shape.kv_heads * self._dim) for n in "kv"]
        parts = [([q, *kv], shard)] if kv_shard == shard else [([q], shard), (kv, kv_shard)]
        self._qkv = [reader.linear(names, target.hidden_size, part) for names, part in parts]
        self._out = reader.linear([(f"{prefix}o_proj", target.hidden_size)], target.heads * self._dim, shard, dim=1)
        self.nbytes = sum(linear.nbytes for linear in (*self._qkv, self._out))
        """Memory the weights held here take."""
        self._norms = None
        if shape.qk_norm:
            q_norm, k_norm = (reader.tensor(f"{prefix}{n}_norm.weight", (self._dim,)) for n in "qk")
            self._norms = q_norm, k_norm

    @property
    def heads_per_kv_head(self) -> int:
        return self._heads // self._kv_heads

    def kv_shape(self) -> tuple[int, int, int]:
        """Of a token: key and value, heads, dimensions."""
        return 2, self._kv_heads, self._dim

    def added_and_normed(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        kv: torch.Tensor,
        norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + attention of x [rows, hidden], over all ranks, and its RMSNorm; writes keys and values into kv.

        norm [hidden]: the RMSNorm's weight. rotation: cos and sin of the rows, [rows, 1, head_dim].
        """
        projected = [linear(x) for linear in self._qkv]
        qkv = (projected[0] if len(projected) == 1 else torch.cat(projected, dim=-1)).view(len(x), -1, self._dim)
        q = keep_keys_and_values(qkv, self._heads, self._norms, self._eps, rotation, kv, batch.slots)
        return added_and_normed(residual, self._out, batch.attention(q, kv, self._scale), self._ranks, norm, self._eps)


def _kv_shard(shard: Shard, kv_heads: int) -> Shard:
    """The keys that a rank's queries look at. Where ranks are more than keys, several ranks hold the same one."""
    if shard.count > kv_heads and shard.count % kv_heads == 0:
        return Shard(shard.index * kv_heads // shard.count, kv_heads)
    return shard
