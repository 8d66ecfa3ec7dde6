"""Training data: which conversations there are, in what order, and what a batch of them holds."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_training.conversations import SUFFIX, Conversation, read_shard, shard_files
from draft_training.network import AnchorBatch
from draft_training.taps import SUFFIX as TAPS_SUFFIX
from draft_training.taps import TapFile, TapShape

_SORT_WINDOW = 32
"""Batches whose conversations are sorted by length together, so that little is padded."""


@dataclass(frozen=True)
class Item:
    """A conversation with its hidden states' place."""

    conversation: Conversation
    taps: TapFile
    index: int

    def rows(self) -> torch.Tensor:
        """[tokens - 1, width] bf16."""
        return self.taps.rows(self.index)


class Dataset:
    """The shards named, as far as they have hidden states."""

    def __init__(self, folder: Path, names: Sequence[str], shape: TapShape):
        self.shape = shape
        self.items: list[Item] = []
        for name in names:
            conversations = read_shard(folder / f"{name}{SUFFIX}")
            taps = TapFile(folder / f"{name}{TAPS_SUFFIX}", conversations, shape)
            # An anchor needs a token behind it.
            self.items += [Item(c, taps, i) for i, c in enumerate(conversations) if c.answer_tokens >= 2]

    @staticmethod
    def complete(folder: Path) -> list[str]:
        """Names of the shards that can be trained on now."""
        names = [path.name.removesuffix(SUFFIX) for path in shard_files(folder)]
        return [name for name in names if (folder / f"{name}{TAPS_SUFFIX}").is_file()]

    def tap_scale(self) -> torch.Tensor:
        """[taps]: what brings each tap to unit mean square, over a sample of answers' tokens."""
        sample = self.items[:: max(1, len(self.items) // 64)]
        rows = torch.cat([item.rows()[item.conversation.answer_start :] for item in sample]).float()
        taps = rows[:, : self.shape.taps * self.shape.hidden_size].unflatten(1, (self.shape.taps, -1))
        return taps.pow(2).mean(dim=(0, 2)).rsqrt()

    def epoch(self, seed: int, epoch: int, batch: int) -> Iterator[list[Item]]:
        """Batches of conversations of similar length, in an order that seed and epoch set. An incomplete last batch is
        left out."""
        chance = random.Random(f"{seed}/{epoch}")
        order = list(self.items)
        chance.shuffle(order)
        window = batch * _SORT_WINDOW
        for start in range(0, len(order), window):
            near = sorted(order[start : start + window], key=lambda item: len(item.conversation.ids))
            batches = [near[i : i + batch] for i in range(0, len(near) - batch + 1, batch)]
            chance.shuffle(batches)
            yield from batches


@dataclass(frozen=True)
class TrainingBatch:
    """Anchors with what should be proposed behind them."""

    anchors: AnchorBatch
    labels: torch.Tensor
    """[C, A, B - 1] int64: the tokens that follow each anchor."""
    valid: torch.Tensor
    """[C, A, B - 1] bool: False behind a conversation's end and for anchors that fill up."""
    target_hidden: torch.Tensor
    """[C, A, B - 1, hidden_size] fp32: the target's final hidden state before each label."""


def make_batch(
    items: Sequence[Item], shape: TapShape, block: int, anchors: int, chance: random.Random, device: torch.device
) -> TrainingBatch:
    """Up to `anchors` random anchors of each conversation, all in its answer. An anchor is a token that was emitted:
    from the answer's first token on, with at least one token behind it."""
    picked: list[Sequence[int]] = []
    for item in items:
        conversation = item.conversation
        places = range(conversation.answer_start, len(conversation.ids) - 1)
        picked.append(sorted(chance.sample(places, min(anchors, len(places)))))
    most = max(map(len, picked))
    length = max(1, max(places[-1] for places in picked))
    hidden = shape.hidden_size
    taps = torch.zeros(len(items), length, shape.taps, hidden)
    positions = torch.zeros(len(items), most, dtype=torch.int64)
    tokens = torch.zeros(len(items), most, block, dtype=torch.int64)
    valid = torch.zeros(len(items), most, block - 1, dtype=torch.bool)
    target_hidden = torch.zeros(len(items), most, block - 1, hidden)
    steps = torch.arange(block)
    for i, (item, chosen) in enumerate(zip(items, picked, strict=True)):
        rows = item.rows()
        used = min(length, len(rows))
        taps[i, :used] = rows[:used, : shape.taps * hidden].unflatten(1, (shape.taps, hidden))
        ids = torch.tensor(item.conversation.ids)
        where = torch.tensor(chosen)
        positions[i, : len(chosen)] = where
        reached = where[:, None] + steps
        tokens[i, : len(chosen)] = ids[reached.clamp(max=len(ids) - 1)]
        valid[i, : len(chosen)] = reached[:, 1:] < len(ids)
        final = rows[:, shape.taps * hidden :]
        target_hidden[i, : len(chosen)] = final[reached[:, :-1].clamp(max=len(rows) - 1)].float()
    return TrainingBatch(
        AnchorBatch(taps.to(device), positions.to(device), tokens.to(device)),
        labels=tokens[:, :, 1:].to(device),
        valid=valid.to(device),
        target_hidden=target_hidden.to(device),
    )
