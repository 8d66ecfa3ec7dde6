"""A forward over several blocks in buffers of fixed size: what is captured as a graph, or run as it is.

The host writes one buffer of integers, one copy brings it to the device; what the step proposes comes back in one copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafter_service.context_blocks import PagedContext
from drafter_service.draft_inputs import DraftInputs, InputShape
from drafter_service.draft_model import BlockRequest
from drafter_service.draft_network import DraftNetwork
from drafter_service.slot_candidates import selector_log_probs
from tandem.checkpoints.draft_config import DraftConfig
from tandem.kernels.paged_attention import paged_attention
from tandem.kernels.rope import keep_keys_and_values
from tandem.kernels.step_tables import length_of, pieces
from tandem.kernels.top_k import top_k


@dataclass(frozen=True)
class DraftBucket:
    """What a step has room for."""

    requests: int
    candidates: int
    """Per slot."""


@dataclass(frozen=True)
class StepBuffers:
    """What all buckets' steps share; each takes views of the beginning."""

    kv: torch.Tensor
    """[layers, blocks, block_tokens, 2, kv_heads, head_dim]"""
    inputs: torch.Tensor
    """[n] int32, on the device."""
    host_inputs: torch.Tensor
    outputs: torch.Tensor
    """[m] int32, on the device; some of it is read as fp32."""
    host_outputs: torch.Tensor

    @classmethod
    def allocate(
        cls, network: DraftNetwork, blocks: int, block_tokens: int, buckets: Sequence[DraftBucket]
    ) -> "StepBuffers":
        config, device = network.config, network.device
        # Zeros, since attention multiplies what it does not look at with zero: it must not be NaN.
        kv = torch.zeros(
            (config.num_hidden_layers, blocks, block_tokens, 2, config.num_key_value_heads, config.head_dim),
            dtype=network.dtype,
            device=device,
        )
        shapes = [InputShape.of(config, bucket.requests, blocks, block_tokens) for bucket in buckets]
        inputs = torch.zeros(max(shape.size for shape in shapes), dtype=torch.int32)
        sizes = [length_of(_output_shapes(config, bucket)) for bucket in buckets]
        outputs = torch.zeros(max(sizes), dtype=torch.int32)
        if device.type == "cpu":
            return cls(kv, inputs, inputs, outputs, outputs)
        return cls(kv, inputs.to(device), inputs.pin_memory(), outputs.to(device), outputs.pin_memory())


class DraftStep:
    """One bucket's step: write, run, read. `run` has no arguments and can be captured."""

    def __init__(self, network: DraftNetwork, buffers: StepBuffers, bucket: DraftBucket):
        self._network, self._buffers, self._bucket = network, buffers, bucket
        shape = InputShape.of(network.config, bucket.requests, *buffers.kv.shape[1:3])
        self._device = DraftInputs.over(buffers.inputs, shape)
        self._host = DraftInputs.over(buffers.host_inputs, shape)
        self._sent = shape.size
        parts = _output_shapes(network.config, bucket)
        self._read = length_of(parts)
        self._tokens, log_probs = pieces(buffers.outputs, parts)
        self._log_probs = log_probs.view(torch.float32)
        self._host_tokens, host_log_probs = pieces(buffers.host_outputs, parts)
        self._host_log_probs = host_log_probs.view(torch.float32)

    def write(self, requests: Sequence[BlockRequest[PagedContext]]) -> None:
        """Describe these blocks, at most as many as the bucket has room for, of different sequences whose contexts have
        blocks for them. Rows behind theirs are padding."""
        self._host.write(requests, self._network.config.mask_token_id, self._buffers.kv.shape[2])
        if self._buffers.inputs is not self._buffers.host_inputs:
            self._buffers.inputs[: self._sent].copy_(self._buffers.host_inputs[: self._sent], non_blocking=True)

    @torch.inference_mode()
    def run(self) -> None:
        network, inputs, bucket = self._network, self._device, self._bucket
        config, weights = network.config, network.weights
        heads, scale = config.num_attention_heads, config.head_dim**-0.5
        rope = network.rope.index_select(0, inputs.positions)
        rotation = rope[:, None, 0], rope[:, None, 1]
        slots = inputs.slots.long()

        def attend(index: int, qkv: torch.Tensor) -> torch.Tensor:
            kv, norms = self._buffers.kv[index], weights.layers[index].query_key_norm
            q = keep_keys_and_values(qkv, heads, (norms[0], norms[-1]), config.rms_norm_eps, rotation, kv, slots)
            return paged_attention(q, kv, inputs.tables[config.layers[index]], scale, config.head_dim)

        x = network.hidden(inputs.ids, attend)
        normed = network.final_norm(x.view(bucket.requests, config.block_size, -1)[:, 1:].flatten(0, 1))
        tokens, log_probs = self._candidates(normed, network.logits(normed))
        self._tokens.copy_(tokens.view_as(self._tokens))
        self._log_probs.copy_(log_probs.view_as(self._log_probs))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """On the host, valid until the next run: tokens [requests, block_size - 1, candidates] and log-probabilities
        [requests, block_size - 1, before, candidates]. before: 1, or with a selector each candidate of the slot before,
        all of them alike in the first."""
        if self._buffers.outputs is not self._buffers.host_outputs:
            self._buffers.host_outputs[: self._read].copy_(self._buffers.outputs[: self._read])
        return self._host_tokens, self._host_log_probs

    def _candidates(self, normed: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, weights = self._bucket.candidates, self._network.weights
        values, tokens, log_sums = top_k(logits, k)
        chosen = tokens if weights.draft_tokens is None else weights.draft_tokens[tokens]
        if weights.selector is None:
            return chosen, values - log_sums[:, None]
        in_blocks = chosen.view(self._bucket.requests, -1, k)
        anchors = self._device.ids.view(self._bucket.requests, -1)[:, :1, None].expand(-1, 1, k)
        before = torch.cat((anchors, in_blocks[:, :-1]), dim=1).flatten(0, 1)
        projected = self._network.selector_projection(normed)
        return chosen, selector_log_probs(values, chosen, before, projected, weights.selector)


def _output_shapes(config: DraftConfig, bucket: DraftBucket) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of tokens and of log-probabilities."""
    slots, k = config.block_size - 1, bucket.candidates
    before = k if config.dflash2 else 1
    return (bucket.requests, slots, k), (bucket.requests, slots, before, k)
