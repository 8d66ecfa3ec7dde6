"""Llama-family targets (LlamaForCausalLM): GQA, half-split RoPE, SwiGLU, RMSNorm."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tandem.checkpoints.folder import CheckpointFolder
from tandem.errors import StartupError
from tandem.layers.linear import Linear
from tandem.layers.norm import rms_norm
from tandem.layers.rope import RopeConfig, apply_rope, rope_table


@dataclass(frozen=True)
class ForwardBatch:
    """A step as tensors. Rows of all segments lie flat, padding rows at the end."""

    token_ids: torch.Tensor
    """[rows] int64."""
    positions: torch.Tensor
    """[rows] int64."""
    slots: torch.Tensor
    """[rows] int64: KV slot (block * block_tokens + offset) each row's key and value are written to."""
    attention: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Attention of the queries [rows, heads, head_dim] over one layer's KV pool -> [rows, heads * head_dim]."""


@dataclass(frozen=True)
class LlamaConfig:
    """What the model needs of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    tied_head: bool
    max_positions: int

    @classmethod
    def from_json(cls, config: dict[str, Any], where: str) -> "LlamaConfig":
        """StartupError naming the key for what is missing or not supported."""
        if config.get("architectures") != ["LlamaForCausalLM"]:
            raise StartupError(
                f"{where}: architectures: {config.get('architectures')} is not supported; supported: LlamaForCausalLM"
            )
        for key, only in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
            if config.get(key, only) != only:
                raise StartupError(f"{where}: {key}: {config[key]!r} is not supported; supported: {only!r}")
        try:
            heads = config["num_attention_heads"]
            return cls(
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                eps=config["rms_norm_eps"],
                rope=RopeConfig.from_config(config),
                tied_head=config.get("tie_word_embeddings", False),
                max_positions=config["max_position_embeddings"],
            )
        except KeyError as error:
            raise StartupError(f"{where}: {error.args[0]}: missing") from None
        except ValueError as error:
            raise StartupError(f"{where}: {error}") from None


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    """[(heads + 2 kv heads) * head_dim, hidden]: q, k, v rows in this order."""
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    """[2 * intermediate, hidden]: gate rows, then up rows."""
    down: Linear


class LlamaModel:
    """The network with its weights; KV lives outside."""

    def __init__(self, folder: CheckpointFolder, dtype: torch.dtype, device: torch.device):
        self.config = c = LlamaConfig.from_json(folder.config, str(folder.path / "config.json"))
        self.dtype = dtype

        def load(name: str, *shape: int) -> torch.Tensor:
            return folder.tensor(name, shape, dtype).to(device)

        hidden, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
        self._embed = load("model.embed_tokens.weight", c.vocab_size, hidden)
        self._layers = []
        for i in range(c.layers):
            prefix = f"model.layers.{i}."
            attn, mlp = prefix + "self_attn.", prefix + "mlp."
            qkv = [load(f"{attn}{n}_proj.weight", width, hidden) for n, width in (("q", q), ("k", kv), ("v", kv))]
            gate_up = [load(f"{mlp}{n}_proj.weight", c.intermediate_size, hidden) for n in ("gate", "up")]
            self._layers.append(
                _Layer(
                    input_norm=load(prefix + "input_layernorm.weight", hidden),
                    qkv=Linear(torch.cat(qkv)),
                    out=Linear(load(attn + "o_proj.weight", hidden, q)),
                    post_norm=load(prefix + "post_attention_layernorm.weight", hidden),
                    gate_up=Linear(torch.cat(gate_up)),
                    down=Linear(load(mlp + "down_proj.weight", hidden, c.intermediate_size)),
                )
            )
        self._norm = load("model.norm.weight", hidden)
        self._head = Linear(self._embed if c.tied_head else load("lm_head.weight", c.vocab_size, hidden))
        if c.tied_head and "lm_head.weight" in folder:
            load("lm_head.weight", c.vocab_size, hidden)
        folder.check_all_read(ignore_suffixes=(".rotary_emb.inv_freq",))
        self._rope = rope_table(c.rope, c.head_dim, c.max_positions, dtype).to(device)

    def kv_shape(self, blocks: int, block_tokens: int) -> tuple[int, ...]:
        """Shape of one layer's KV pool."""
        return blocks, block_tokens, 2, self.config.kv_heads, self.config.head_dim

    def forward(
        self, batch: ForwardBatch, kv: list[torch.Tensor], tap_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """All layers over the rows; writes their keys and values into kv (one pool per layer).

        Returns the residual stream [rows, hidden] after the last layer, before the final norm, and the taps: the
        residual stream after each layer of tap_layers, in that order.
        """
        c = self.config
        rows = batch.token_ids.shape[0]
        x = F.embedding(batch.token_ids, self._embed)
        cos, sin = self._rope.index_select(0, batch.positions)[:, :, None].unbind(1)
        taps: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(x, layer.input_norm, c.eps)).view(rows, -1, c.head_dim)
            rotated = apply_rope(qkv[:, : c.heads + c.kv_heads], cos, sin)
            q, k = rotated[:, : c.heads], rotated[:, c.heads :]
            v = qkv[:, c.heads + c.kv_heads :]
            kv[i].flatten(0, 1).index_copy_(0, batch.slots, torch.stack((k, v), dim=1))
            x = layer.out.added_to(x, batch.attention(q, kv[i]))
            gate, up = layer.gate_up(rms_norm(x, layer.post_norm, c.eps)).chunk(2, dim=-1)
            x = layer.down.added_to(x, F.silu(gate) * up)
            if i in tap_layers:
                taps[i] = x
        return x, [taps[i] for i in tap_layers]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] in the model's dtype, from rows of forward's residual stream."""
        return self._head(rms_norm(hidden, self._norm, self.config.eps))
