"""The target over many sequences at once, one token each per step: what writing data needs, and no more."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from draft_training.prefill import prefill
from tandem.errors import StartupError
from verifier_service.models.llama import ForwardBatch, LlamaModel


@dataclass(frozen=True)
class SlotStep:
    """Outcome of a step, row i for slot i."""

    logits: torch.Tensor
    """[slots, vocab_size]"""
    taps: torch.Tensor
    """[slots, width]: the taps, then the final hidden state."""


@dataclass(frozen=True)
class Prefix:
    """The beginning that many conversations have in common, computed once."""

    kv: list[torch.Tensor]
    """Per layer [tokens, 2, kv_heads, head_dim]."""
    taps: torch.Tensor
    """[tokens, width]"""


class SlotDecoder:
    """A KV cache of equal slots, each a contiguous run, so that attention reads it without gathering."""

    def __init__(
        self, model: LlamaModel, slots: int, max_tokens: int, tap_layers: tuple[int, ...], device: torch.device
    ):
        """StartupError if the target cannot hold max_tokens."""
        if max_tokens > model.config.max_positions:
            raise StartupError(f"prompt and answer of {max_tokens} tokens: the target has {model.config.max_positions}")
        self.device = device
        self.max_tokens = max_tokens
        self.width = (len(tap_layers) + 1) * model.config.hidden_size
        self._model = model
        self._tap_layers = tap_layers
        self._kv = [
            torch.zeros(model.kv_shape(slots, max_tokens), dtype=model.dtype, device=device)
            for _ in range(model.config.layers)
        ]
        self._first_rows = torch.arange(slots, device=device) * max_tokens

    @torch.inference_mode()
    def step(self, tokens: list[int], positions: list[int]) -> SlotStep:
        """Slot i takes tokens[i] at positions[i]; what it held from there on is forgotten."""
        where = torch.tensor(positions, device=self.device)
        length = max(positions) + 1
        unseen = torch.arange(length, device=self.device) > where[:, None]
        mask = torch.zeros(unseen.shape, dtype=self._model.dtype, device=self.device)
        mask = mask.masked_fill_(unseen, -torch.inf)[:, None, None]

        def attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            slots, heads, head_dim = q.shape
            queries = q.view(slots, kv.shape[3], -1, head_dim)
            keys, values = kv[:, :length, 0].transpose(1, 2), kv[:, :length, 1].transpose(1, 2)
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            return out.reshape(slots, heads * head_dim)

        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, device=self.device),
            positions=where,
            slots=self._first_rows + where,
            attention=attend,
        )
        hidden, taps = self._model.forward(batch, self._kv, self._tap_layers)
        return SlotStep(self._model.logits(hidden), torch.cat([*taps, hidden], dim=-1))

    @torch.inference_mode()
    def prefix(self, tokens: list[int]) -> Prefix:
        """Compute a beginning."""
        model = self._model
        pools = [
            torch.empty(model.kv_shape(1, len(tokens)), dtype=model.dtype, device=self.device)
            for _ in range(model.config.layers)
        ]
        taps = prefill(model, [tokens], pools, self._tap_layers)[0]
        return Prefix([pool[0] for pool in pools], taps)

    def begin_with(self, slot: int, prefix: Prefix) -> None:
        """Put a beginning into a slot, at position 0."""
        for pool, rows in zip(self._kv, prefix.kv, strict=True):
            pool[slot, : len(rows)] = rows
