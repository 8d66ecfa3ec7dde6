"""Drafts of sequences whose contexts each lie in one piece: the way of CPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Generic, TypeVar

import torch

from drafter_service.block_attention import BlockAttention
from drafter_service.context_kv import ContextKV
from drafter_service.draft_network import DraftNetwork
from drafter_service.slot_candidates import greedy_blocks, independent_candidates, selected_candidates
from tandem.draft_tree import Candidates, Draft, best_chain, build_tree, sample_chain
from tandem.speculation import DraftShape

MAX_CANDIDATES = 32
"""Candidates per slot of a tree. Exact for trees of up to 32 nodes: a node of rank r has r better siblings. In larger
ones what is left out has a probability below 1 / 33 in its own slot, and taking it in costs as much again in top-k."""

KV = TypeVar("KV")
"""Where a sequence's keys and values are."""


@dataclass(frozen=True)
class ContextRows(Generic[KV]):
    """Features of consecutive positions of one sequence."""

    kv: KV
    start: int
    features: torch.Tensor
    """[count, hidden_size], any float dtype."""


@dataclass(frozen=True)
class BlockRequest(Generic[KV]):
    """A block to run behind the first `base` positions of a sequence, all of which must be written."""

    kv: KV
    base: int
    anchor: int
    nodes: int
    """Nodes wanted, at least 1. A chain has at most block_size - 1. Torch runs the block with all its slots whatever
    this is, as in training; the CPU's own path with so many."""
    shape: DraftShape = DraftShape.BLOCK


class DraftModel:
    """A loaded draft model. Not thread-safe."""

    def __init__(self, network: DraftNetwork):
        self.config = network.config
        self._network = network

    @classmethod
    def load(
        cls, draft_folder: Path, target_folder: Path, dtype: torch.dtype, device: torch.device, int8: bool = False
    ) -> "DraftModel":
        """See DraftNetwork.load."""
        return cls(DraftNetwork.load(draft_folder, target_folder, dtype, device, int8))

    def new_context(self) -> ContextKV:
        """Room for one sequence's keys and values."""
        config, network = self.config, self._network
        before = (config.num_hidden_layers, 2, config.num_key_value_heads)
        return ContextKV(before, (config.head_dim,), network.dtype, network.device)

    def has_room(self, positions: int) -> bool:
        """Whether reserve would succeed for a new context."""
        return True

    def reserve(self, kv: ContextKV, positions: int) -> bool:
        """Make room for so many positions and a block behind them."""
        kv.reserve(positions + self.config.block_size)
        return True

    @torch.inference_mode()
    def write_context(self, contexts: Sequence[ContextRows[ContextKV]]) -> None:
        """Compute and store the keys and values of features, contexts in order; each has at least one row."""
        network = self._network
        network.cover(max(c.start + len(c.features) for c in contexts))
        features = torch.cat([c.features for c in contexts])
        rope = torch.cat([network.rope[c.start : c.start + len(c.features)] for c in contexts])
        kv = network.context_kv(features, rope).permute(1, 2, 3, 0, 4)
        first = 0
        for context in contexts:
            rows, end = len(context.features), context.start + len(context.features)
            context.kv.reserve(end)[:, :, :, context.start : end] = kv[:, :, :, first : first + rows]
            first += rows

    @torch.inference_mode()
    def draft(
        self,
        requests: Sequence[BlockRequest[ContextKV]],
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[Draft]:
        """One forward over the blocks of all requests, which are of different sequences.

        A block is the chain of the most probable tokens, a tree the most probable prefixes. With a temperature the
        blocks of a DFlash2 model are drawn from its selector's distributions, as the rejection rule min(1, p / q)
        needs it, and log_probs are log q; ValueError for trees and for DFlash, whose blocks are not drawn: slots that
        do not see each other's draws rarely agree.
        """
        if temperature > 0:
            if self.config.dflash2 is None or any(r.shape is DraftShape.TREE for r in requests):
                raise ValueError("temperature: only the blocks of DFlash2 draft models are drawn")
            candidates = self.candidates(requests)
            return [
                sample_chain(c, temperature, torch.rand(len(c.tokens), generator=generator).tolist())
                for c in candidates
            ]
        if self.config.dflash2 is not None:
            return [draft_from(c, r.nodes, r.shape) for c, r in zip(self.candidates(requests), requests, strict=True)]
        # Blocks need no more than the best token of each row: they come first, so that both kinds are whole slices.
        order = sorted(range(len(requests)), key=lambda i: requests[i].shape is DraftShape.TREE)
        ordered = [requests[i] for i in order]
        logits = self.block_logits(ordered)
        slots = [self._slots(r) for r in ordered]
        blocks = sum(r.shape is DraftShape.BLOCK for r in requests)
        rows = sum(slots[:blocks])
        drafts = []
        if blocks:
            drafts += greedy_blocks(logits[:rows], self._network.weights.draft_tokens, slots[:blocks])
        if trees := ordered[blocks:]:
            candidates = self._independent_candidates(trees, logits[rows:])
            drafts += [draft_from(c, r.nodes, r.shape) for c, r in zip(candidates, trees, strict=True)]
        return [draft for _, draft in sorted(zip(order, drafts, strict=True), key=itemgetter(0))]

    @torch.inference_mode()
    def candidates(self, requests: Sequence[BlockRequest[ContextKV]]) -> list[Candidates]:
        """What draft chooses from: of each request the first `nodes` slots, all slots if there are fewer.

        DFlash: as many candidates as the largest request has nodes, at most 32. DFlash2: selector_top_k, with the
        distributions of its selector.
        """
        hidden = self._forward(requests)
        logits = self._network.logits(hidden)
        selector = self._network.weights.selector
        if selector is None:
            return self._independent_candidates(requests, logits)
        return selected_candidates(
            logits,
            self._network.weights.draft_tokens,
            [self._slots(r) for r in requests],
            torch.tensor([r.anchor for r in requests], device=self._network.device),
            self._network.selector_projection(hidden),
            selector,
        )

    @torch.inference_mode()
    def block_logits(self, requests: Sequence[BlockRequest[ContextKV]]) -> torch.Tensor:
        """[sum of slots, vocab_size] fp32: of the first `nodes` slots behind each request's anchor, all if there are
        fewer. With a reduced head there is a column for each of its tokens only."""
        return self._network.logits(self._forward(requests))

    def _independent_candidates(
        self, requests: Sequence[BlockRequest[ContextKV]], logits: torch.Tensor
    ) -> list[Candidates]:
        k = min(max(r.nodes for r in requests), MAX_CANDIDATES, logits.shape[1])
        return independent_candidates(logits, self._network.weights.draft_tokens, [self._slots(r) for r in requests], k)

    def _slots(self, request: BlockRequest[ContextKV]) -> int:
        return min(request.nodes, self.config.block_size - 1)

    def _forward(self, requests: Sequence[BlockRequest[ContextKV]]) -> torch.Tensor:
        """[sum of slots, hidden_size]: the normed output of the slots that are wanted."""
        config, network, block = self.config, self._network, self.config.block_size
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        sequences, groups = len(requests), heads // kv_heads
        network.cover(max(request.base for request in requests) + block)
        ids = torch.full((sequences, block), config.mask_token_id)
        ids[:, 0] = torch.tensor([request.anchor for request in requests])
        rope = torch.cat([network.rope[r.base : r.base + block] for r in requests])
        cos, sin = rope[:, None, 0], rope[:, None, 1]
        attention = [BlockAttention(r.kv, r.base, config, network.device) for r in requests]

        def attend(index: int, qkv: torch.Tensor) -> torch.Tensor:
            network.rotate_queries_and_keys(index, qkv, cos, sin)
            # Query heads that share a key head become rows of one attention problem: keys are not expanded.
            queries = qkv[:, :heads].view(sequences, block, kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
            queries = queries.reshape(sequences, kv_heads, groups * block, head_dim)
            kv = qkv[:, heads:].view(sequences, block, 2, kv_heads, head_dim).permute(0, 2, 3, 1, 4)
            outputs = [a.attend(index, queries[i : i + 1], kv[i]) for i, a in enumerate(attention)]
            output = (torch.cat(outputs) if sequences > 1 else outputs[0]).view(
                sequences, kv_heads, groups, block, head_dim
            )
            return output.permute(0, 3, 1, 2, 4).reshape(sequences * block, heads * head_dim)

        x = network.hidden(ids.flatten().to(network.device), attend)
        wanted = [i * block + slot for i, r in enumerate(requests) for slot in range(1, self._slots(r) + 1)]
        return network.final_norm(x[torch.tensor(wanted).to(network.device)])


def draft_from(candidates: Candidates, nodes: int, shape: DraftShape) -> Draft:
    """The draft of a request that wants so many nodes in such a shape."""
    build = build_tree if shape is DraftShape.TREE else best_chain
    return build(candidates, nodes)
