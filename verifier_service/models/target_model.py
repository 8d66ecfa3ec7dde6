"""What the verifier needs of a target, whatever its architecture."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.kernels.step_tables import StepTables
from tandem.native.library import Projection

Attention = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(queries [rows, heads, key_dim], one layer's KV pool, scale) -> [rows, heads * value_dim]. With latent KV the whole
keys serve as values: value_dim is key_dim, and what lies behind the latent means nothing."""


TapProjection = Callable[[torch.Tensor], torch.Tensor] | Projection
"""Taps [rows, taps * hidden] to features [rows, out]; or what the native path does that with."""


@dataclass(frozen=True)
class ForwardBatch:
    """A step as tensors. Rows of all segments lie flat, padding rows at the end."""

    token_ids: torch.Tensor
    """[rows] int64."""
    positions: torch.Tensor
    """[rows] int64."""
    slots: torch.Tensor
    """[rows] int64: KV slot (block * block_tokens + offset) each row's key and value are written to."""
    attention: Attention
    padding: int = 0
    """Rows at the end that stand for nothing; a mixture of experts leaves them out."""
    tables: StepTables | None = None
    """What each row may look at, in fixed buffers, for steps of fixed shape: `attention` reads them then, padding rows
    are not left out, and nothing in the forward may wait for the device."""


@dataclass(frozen=True)
class Features:
    """What a draft model takes of a step, and where it is kept."""

    layers: tuple[int, ...]
    """Tapped: the residual stream after each of them, side by side, is what is projected."""
    projection: TapProjection
    pool: torch.Tensor
    """[slots, out]"""


class TargetModel(Protocol):
    """A network with its weights, or one rank's part of it; KV lives outside."""

    vocab_size: int
    hidden_size: int
    layers: int
    max_positions: int
    dtype: torch.dtype
    heads_per_kv_head: int
    """Query heads of this rank that share a key: what attention folds into the query length."""
    value_dim: int
    """Of a head's key in the KV pool the dims that are its value too, with latent KV; otherwise the head's own."""
    wants_tables: bool
    """Whether forward reads `ForwardBatch.tables` itself, on any device, and has its rows' bits independent of what
    shares the step: it is given exactly the real rows."""
    head_is_split: bool
    """Whether logits() is a collective that every rank must call; otherwise rank 0 alone does."""

    @property
    def routes(self) -> tuple[int, int]:
        """Mixtures of experts, and experts per token: (0, 0) without any."""
        ...

    @property
    def routing(self) -> list[torch.Tensor]:
        """Per mixture of experts [rows, experts per token] int64: where the last forward's real rows went."""
        ...

    def kv_shape(self, blocks: int, block_tokens: int) -> tuple[int, ...]:
        """Shape of one layer's KV pool: [blocks, block_tokens, 2, kv heads, head_dim], or with latent KV (MLA)
        [blocks, block_tokens, 1, 1, latent + rope dims], whose values are the keys' first `latent` dims."""
        ...

    def forward(
        self, batch: ForwardBatch, kv: list[torch.Tensor], tap_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers over the rows; writes their keys and values into kv (one pool per layer).

        Returns the residual stream [rows, hidden] after the last layer, before the final norm, and the taps: the
        residual stream after each layer of tap_layers, side by side in that order, [rows, taps * hidden]. The same on
        every rank.
        """
        ...

    def forward_with_features(self, batch: ForwardBatch, kv: list[torch.Tensor], features: Features) -> torch.Tensor:
        """The same with the features of all rows, padding included, written to features.pool at batch.slots. Returns
        the residual stream."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] in the model's dtype, from rows of forward's residual stream; complete on rank 0."""
        ...
