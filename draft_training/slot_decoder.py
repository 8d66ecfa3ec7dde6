"""The target over many sequences at once, one token each per step: what writing data needs, and no more."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from draft_training.prefill import prefill, step_tables
from tandem.errors import StartupError
from verifier_service.models.target_model import Attention, ForwardBatch, TargetModel


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
    """Per layer the KV of the tokens, as a slot holds it."""
    taps: torch.Tensor
    """[tokens, width]"""


class SlotDecoder:
    """A KV cache of equal slots, each a contiguous run, so that attention reads it without gathering."""

    def __init__(
        self, model: TargetModel, slots: int, max_tokens: int, tap_layers: tuple[int, ...], device: torch.device
    ):
        """StartupError if the target cannot hold max_tokens."""
        if max_tokens > model.max_positions:
            raise StartupError(f"prompt and answer of {max_tokens} tokens: the target has {model.max_positions}")
        self.device = device
        self.max_tokens = max_tokens
        self.width = (len(tap_layers) + 1) * model.hidden_size
        self._model = model
        self._tap_layers = tap_layers
        self._kv = [
            torch.zeros(model.kv_shape(slots, max_tokens), dtype=model.dtype, device=device)
            for _ in range(model.layers)
        ]
        self._first_rows = torch.arange(slots, device=device) * max_tokens
        self._tables = step_tables(model, [[0]] * slots, [[slot] for slot in range(slots)], max_tokens)

    @torch.inference_mode()
    def step(self, tokens: list[int], positions: list[int]) -> SlotStep:
        """Slot i takes tokens[i] at positions[i]; what it held from there on is forgotten."""
        where = torch.tensor(positions, device=self.device)
        lengths = [position + 1 for position in positions]
        if self._tables:
            self._tables.prefixes.copy_(where + 1)
        attend = _attend_each(lengths) if self.device.type == "cpu" else _attend_padded(where, max(lengths))
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, device=self.device),
            positions=where,
            slots=self._first_rows + where,
            attention=attend,
            tables=self._tables,
        )
        hidden, taps = self._model.forward(batch, self._kv, self._tap_layers)
        return SlotStep(self._model.logits(hidden), torch.cat([taps, hidden], dim=-1))

    @torch.inference_mode()
    def prefix(self, tokens: list[int]) -> Prefix:
        """Compute a beginning."""
        model = self._model
        pools = [
            torch.empty(model.kv_shape(len(tokens), 1), dtype=model.dtype, device=self.device)
            for _ in range(model.layers)
        ]
        taps = prefill(model, [tokens], pools, self._tap_layers)[0]
        return Prefix([pool[:, 0] for pool in pools], taps)

    def begin_with(self, slot: int, prefix: Prefix) -> None:
        """Put a beginning into a slot, at position 0."""
        for pool, rows in zip(self._kv, prefix.kv, strict=True):
            pool[slot, : len(rows)] = rows


def _attend_padded(positions: torch.Tensor, length: int) -> Attention:
    """All slots in one call, as if each were as long as the longest."""
    unseen = torch.arange(length, device=positions.device) > positions[:, None]

    def attend(q: torch.Tensor, kv: torch.Tensor, scale: float) -> torch.Tensor:
        slots, heads, head_dim = q.shape
        keys, values = _keys_and_values(kv[:, :length].transpose(1, 3), 2)
        mask = torch.zeros(unseen.shape, dtype=q.dtype, device=q.device).masked_fill_(unseen, -torch.inf)
        out = F.scaled_dot_product_attention(
            q.view(slots, kv.shape[3], -1, head_dim), keys, values, attn_mask=mask[:, None, None], scale=scale
        )
        return out.reshape(slots, heads * head_dim)

    return attend


def _attend_each(lengths: list[int]) -> Attention:
    """Slot by slot. On a CPU attention is bound by what it reads, and calls cost little: reading no slot beyond its
    length takes 0.7 of the padded call's time."""

    def attend(q: torch.Tensor, kv: torch.Tensor, scale: float) -> torch.Tensor:
        slots, heads, head_dim = q.shape
        queries = q.view(slots, kv.shape[3], -1, head_dim) * scale
        out = torch.empty_like(queries)
        for query, result, slot, length in zip(queries, out, kv, lengths, strict=True):
            keys, values = _keys_and_values(slot[:length].transpose(0, 2), 1)
            torch.bmm(torch.softmax(torch.bmm(query, keys.transpose(1, 2)), dim=-1), values, out=result)
        return out.view(slots, heads * head_dim)

    return attend


def _keys_and_values(kv: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both parts of `dim`; of latent KV, which has one, that one twice."""
    return kv.select(dim, 0), kv.select(dim, -1)
