"""What a batch holds, and in which batches conversations come."""

import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch

from draft_training.conversations import SUFFIX, frequent_tokens, write_shard
from draft_training.dataset import Dataset, Item, make_batch
from draft_training.taps import SUFFIX as TAPS_SUFFIX
from draft_training.taps import TapWriter
from tests.fakes.tiny_models import HIDDEN
from tests.unit.training.worlds import CPU, SHAPE, random_conversations, write_random_shard


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    write_random_shard(tmp_path, "a", 40, seed=1)
    write_random_shard(tmp_path, "b", 33, seed=2)
    return Dataset(tmp_path, ["a", "b"], SHAPE)


def names(batches: list[list[Item]]) -> list[list[int]]:
    return [[id(item) for item in batch] for batch in batches]


def test_an_epoch_has_every_conversation_at_most_once(dataset: Dataset) -> None:
    """Full batches of different conversations, at most an incomplete batch's worth left out; seed and epoch set the
    order, and nothing else."""
    for size in (1, 4, 10):
        batches = list(dataset.epoch(0, 0, size))
        seen = Counter(id(item) for batch in batches for item in batch)
        assert {len(batch) for batch in batches} == {size}
        assert max(seen.values()) == 1
        assert len(seen) == len(dataset.items) // size * size
    first = names(list(dataset.epoch(0, 0, 4)))
    assert names(list(dataset.epoch(0, 0, 4))) == first
    assert names(list(dataset.epoch(0, 1, 4))) != first
    assert names(list(dataset.epoch(1, 0, 4))) != first


def test_batches_hold_conversations_of_similar_length(dataset: Dataset) -> None:
    """So that little is padded: within batches lengths differ less than among all."""
    spans = []
    for batch in dataset.epoch(0, 0, 4):
        lengths = [len(item.conversation.ids) for item in batch]
        spans.append(max(lengths) - min(lengths))
    assert sum(spans) / len(spans) < 5


def test_shards_without_hidden_states_wait(dataset: Dataset, tmp_path: Path) -> None:
    """Data that cannot be trained on yet is no part of an epoch, and answers of one token never are."""
    write_shard(tmp_path / f"c{SUFFIX}", random_conversations(5, seed=3))
    assert Dataset.complete(tmp_path) == ["a", "b"]
    assert all(item.conversation.answer_tokens >= 2 for item in dataset.items)


def test_a_batch_is_its_conversations(dataset: Dataset) -> None:
    """Anchors are distinct tokens of the answer with a token behind them; a block's tokens and labels are those that
    follow; the context's rows are the conversation's own; the target's hidden state is the one that chose the label."""
    items = sorted(dataset.items, key=lambda item: len(item.conversation.ids))[10:60:7]
    batch = make_batch(items, SHAPE, 4, 5, random.Random(3), CPU)
    anchors = batch.anchors
    filled = 0
    for row, item in enumerate(items):
        ids, rows = item.conversation.ids, item.rows().float()
        start, many = item.conversation.answer_start, min(5, item.conversation.answer_tokens - 1)
        places = anchors.positions[row, :many].tolist()
        assert len(set(places)) == many
        assert all(start <= place < len(ids) - 1 for place in places)
        assert not batch.valid[row, many:].any()
        filled += 5 - many
        for i, place in enumerate(places):
            follows = ids[place + 1 : place + 4]
            assert anchors.tokens[row, i, 0] == ids[place]
            assert batch.valid[row, i].tolist() == [k < len(follows) for k in range(3)]
            assert batch.labels[row, i].tolist()[: len(follows)] == follows
            assert anchors.tokens[row, i].tolist()[: len(follows) + 1] == [ids[place], *follows]
            for k in range(len(follows)):
                assert torch.equal(batch.target_hidden[row, i, k], rows[place + k, 2 * HIDDEN :])
            # A block sees what lies before its anchor, which must be there.
            expected = rows[:place, : 2 * HIDDEN].view(place, 2, HIDDEN)
            assert torch.equal(anchors.taps[row, :place], expected)
        assert not anchors.taps[row, len(rows) :].any()
    assert filled > 0, "some conversation should have too few anchors"


def test_anchors_follow_the_generator(dataset: Dataset) -> None:
    """The same state gives the same anchors; another, others."""
    items = [item for item in dataset.items if item.conversation.answer_tokens > 10][:3]
    batches = [make_batch(items, SHAPE, 4, 3, random.Random(seed), CPU).anchors.positions for seed in (1, 1, 2)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_every_anchor_comes_up(dataset: Dataset) -> None:
    """Over many epochs, first and last place of an answer included."""
    item = next(item for item in dataset.items if item.conversation.answer_tokens == 9)
    seen = set()
    for epoch in range(60):
        seen |= set(make_batch([item], SHAPE, 4, 2, random.Random(epoch), CPU).anchors.positions[0].tolist())
    start = item.conversation.answer_start
    assert seen == set(range(start, start + 8))


def test_frequent_tokens(dataset: Dataset) -> None:
    """The most frequent tokens of answers; of a corpus that has fewer, lowest ids fill up. Prompts do not count."""
    conversations = [item.conversation for item in dataset.items]
    counts = Counter(token for c in conversations for token in c.ids[c.answer_start :])
    chosen = frequent_tokens(conversations, 50)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 50
    left_out = max(count for token, count in counts.items() if token not in chosen)
    assert min(counts[token] for token in chosen) >= left_out
    everything = frequent_tokens(conversations, 450)
    assert len(everything) == 450
    assert set(counts) <= set(everything)
    spare = [token for token in everything if token not in counts]
    assert spare == list(islice((t for t in range(450) if t not in counts), len(spare)))


def test_tap_scale_brings_taps_to_unit_size(tmp_path: Path) -> None:
    """Each tap's mean square over answers is 1 after scaling, however different their sizes are."""
    conversations = random_conversations(30, seed=5)
    write_shard(tmp_path / f"a{SUFFIX}", conversations)
    writer = TapWriter(tmp_path / f"a{TAPS_SUFFIX}")
    generator = torch.Generator().manual_seed(1)
    for conversation in conversations:
        rows = torch.randn(len(conversation.ids) - 1, 3, HIDDEN, generator=generator)
        rows = rows * torch.tensor([40.0, 0.02, 7.0])[:, None]
        rows[: conversation.answer_start] *= 1000
        writer.append(rows.flatten(1))
    writer.close()
    scale = Dataset(tmp_path, ["a"], SHAPE).tap_scale()
    torch.testing.assert_close(scale, torch.tensor([1 / 40.0, 50.0]), rtol=0.03, atol=0)
