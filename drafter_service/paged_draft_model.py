"""Drafts of sequences whose contexts lie in one pool of blocks, by steps of fixed shape: the way of GPUs."""

from collections.abc import Sequence

import numpy as np
import torch

from drafter_service.context_blocks import ContextBlocks, PagedContext
from drafter_service.draft_model import MAX_CANDIDATES, BlockRequest, ContextRows, draft_from
from drafter_service.draft_network import DraftNetwork
from drafter_service.draft_step import DraftBucket, DraftStep, StepBuffers
from drafter_service.metrics import DrafterMetrics
from tandem.draft_tree import Candidates, Draft
from tandem.errors import StartupError
from tandem.graphs import BucketState, CapturedSteps, Driver, driver_for
from tandem.speculation import DraftShape

_REQUESTS = (32, 16, 8, 4, 2, 1)
"""Of a step. More at once take several."""


class PagedDraftModel:
    """A loaded draft model and the contexts of its sequences. Not thread-safe."""

    def __init__(
        self,
        network: DraftNetwork,
        metrics: DrafterMetrics,
        blocks: int,
        block_tokens: int,
        eager_fallback: bool = True,
        driver: Driver | None = None,
    ):
        """Captures all steps. blocks: KV blocks in all. driver: by default the device's. StartupError if the blocks do
        not fit into memory, or a step cannot be captured and may not run eagerly."""
        self.config = network.config
        self.blocks = ContextBlocks(blocks, block_tokens, metrics.contexts_dropped.inc)
        self._network, self._metrics = network, metrics
        network.make_room(blocks * block_tokens)
        buckets = [DraftBucket(requests, k) for requests in _REQUESTS for k in self._candidates()]
        try:
            self._buffers = StepBuffers.allocate(network, blocks, block_tokens, buckets)
        except torch.OutOfMemoryError as error:
            raise StartupError(f"drafter.kv_blocks: {blocks} blocks of {block_tokens} tokens: {error}") from None
        self._slots = self._buffers.kv.flatten(1, 2)
        self._steps = {bucket: DraftStep(network, self._buffers, bucket) for bucket in buckets}
        self._captured: CapturedSteps[DraftBucket] = CapturedSteps(driver or driver_for(network.device), eager_fallback)
        self._captured.capture([(bucket, step.run) for bucket, step in self._steps.items()])
        self._count_buckets()

    @property
    def buckets(self) -> list[BucketState[DraftBucket]]:
        """States of the steps, largest first; safe from any thread."""
        return list(self._captured)

    def new_context(self) -> PagedContext:
        return self.blocks.new_context()

    def has_room(self, positions: int) -> bool:
        """Whether reserve would succeed for a new context."""
        return self.blocks.has_room(positions + self.config.block_size)

    def reserve(self, kv: PagedContext, positions: int) -> bool:
        """Make room for so many positions and a block behind them. False if there is none, or was none before: then
        nothing of this context is kept."""
        return self.blocks.reserve(kv, positions + self.config.block_size)

    @torch.inference_mode()
    def write_context(self, contexts: Sequence[ContextRows[PagedContext]]) -> None:
        """Compute and store the keys and values of features, contexts in order; each has at least one row. Dropped
        contexts are left out. Nothing here waits for the device."""
        contexts = [c for c in contexts if not c.kv.dropped]
        if not contexts:
            return
        self._network.cover(max(c.start + len(c.features) for c in contexts))
        positions = np.concatenate([np.arange(c.start, c.start + len(c.features)) for c in contexts])
        blocks = np.concatenate(
            [
                np.repeat(np.array(c.kv.blocks), self.blocks.block_tokens)[c.start : c.start + len(c.features)]
                for c in contexts
            ]
        )
        slots = blocks * self.blocks.block_tokens + positions % self.blocks.block_tokens
        features = torch.cat([c.features for c in contexts])
        # Written twice in one go, a slot could hold either.
        _, from_last = np.unique(slots[::-1], return_index=True)
        if len(from_last) < len(slots):
            kept = len(slots) - 1 - from_last
            positions, slots, features = positions[kept], slots[kept], features[torch.from_numpy(kept)]
        rows = self._to_device(torch.from_numpy(np.stack((positions, slots))))
        rope = self._network.rope.index_select(0, rows[0])
        kv = self._network.context_kv(self._to_device(features), rope)
        self._slots.index_copy_(1, rows[1], kv.transpose(0, 1))

    @torch.inference_mode()
    def draft(self, requests: Sequence[BlockRequest[PagedContext]]) -> list[Draft]:
        """A forward over the blocks of all requests, which are of different sequences and have room. A block is the
        chain of the most probable tokens, a tree the most probable prefixes."""
        drafts: list[Draft] = []
        for first in range(0, len(requests), _REQUESTS[0]):
            drafts += self._draft(requests[first : first + _REQUESTS[0]])
        return drafts

    def _draft(self, requests: Sequence[BlockRequest[PagedContext]]) -> list[Draft]:
        few, *many = self._candidates()
        candidates = many[0] if many and any(r.shape is DraftShape.TREE for r in requests) else few
        room = min(size for size in _REQUESTS if size >= len(requests))
        bucket = DraftBucket(room, candidates)
        step = self._steps[bucket]
        step.write(requests)
        ran = self._captured.run(bucket, step.read)
        if ran.replayed:
            self._metrics.graph_replays.labels(room).inc()
        elif ran.fallback:
            self._metrics.graph_fallbacks.labels(ran.fallback.value).inc()
            self._count_buckets()
        self._metrics.kv_blocks_used.set(self.blocks.used)
        tokens, log_probs = (values[: len(requests)].tolist() for values in ran.result)
        return [self._to_draft(*parts) for parts in zip(requests, tokens, log_probs, strict=True)]

    def _to_draft(
        self, request: BlockRequest[PagedContext], tokens: list[list[int]], log_probs: list[list[list[float]]]
    ) -> Draft:
        """tokens [slots][candidates], log_probs [slots][before][candidates]: of one request."""
        slots = min(request.nodes, self.config.block_size - 1)
        if self.config.dflash2 is None and request.shape is DraftShape.BLOCK:
            return Draft.block([t[0] for t in tokens[:slots]], [p[0][0] for p in log_probs[:slots]])
        after_anchor = [log_probs[0][:1], *log_probs[1:slots]]
        return draft_from(Candidates(tokens[:slots], after_anchor), request.nodes, request.shape)

    def _candidates(self) -> tuple[int, ...]:
        """Per slot, of the steps there are: blocks of slots that do not see each other's proposals need but one."""
        config = self.config
        if config.dflash2 is not None:
            return (config.dflash2.selector_top_k,)
        return 1, min(MAX_CANDIDATES, config.draft_vocab_size or config.vocab_size)

    def _count_buckets(self) -> None:
        captured = sum(state.captured for state in self._captured)
        self._metrics.graph_buckets.labels("true").set(captured)
        self._metrics.graph_buckets.labels("false").set(len(self._steps) - captured)

    def _to_device(self, x: torch.Tensor) -> torch.Tensor:
        if self._network.device.type == "cpu":
            return x
        return x.pin_memory().to(self._network.device, non_blocking=True)
