"""The static step over paged contexts against the model with contexts in one piece, float32 on CPU."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from drafter_service.context_blocks import IDLE_SECONDS, PagedContext
from drafter_service.context_kv import ContextKV
from drafter_service.draft_model import KV, BlockRequest, ContextRows, DraftModel
from drafter_service.draft_network import DraftNetwork
from drafter_service.drafter import Drafter, ServedModel
from drafter_service.loading import load_draft_model
from drafter_service.messages import Gap
from drafter_service.metrics import DrafterMetrics
from drafter_service.paged_draft_model import PagedDraftModel
from tandem.config import DrafterConfig
from tandem.draft_tree import Draft
from tandem.errors import StartupError
from tandem.graphs import Step
from tandem.speculation import Context, DraftRequest, DraftShape, Round
from tests.fakes.draft_folders import (
    HIDDEN,
    VOCAB,
    dflash2_config,
    draft_config,
    draft_tensors,
    write_draft,
    write_target,
)

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")

SLIDING = {"sliding_window": 5, "use_sliding_window": True}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "full": draft_config(),
    "causal": draft_config(is_causal=True),
    "sliding, causal by default": draft_config(**SLIDING, layer_types=MIXED),
    "sliding, not causal": draft_config(**SLIDING, layer_types=MIXED, is_causal=False),
    "window of pages": draft_config(
        sliding_window=40, use_sliding_window=True, layer_types=["sliding_attention"] * 3, is_causal=False
    ),
    "biases, scaled and capped": draft_config(
        attention_bias=True,
        dflash_config={
            "mask_token_id": 500,
            "target_layer_ids": [1, 4, 7],
            "input_embedding_scale": 0.5,
            "output_multiplier": 0.8,
            "final_logit_softcapping": 20.0,
        },
    ),
    "DFlash2": dflash2_config(),
    "DFlash2, three taps, block of five": dflash2_config({"block_size": 5, "conv_kernel_size": 3}),
}
BLOCK_TOKENS = 16


def load(folder: Path, config: dict[str, Any], blocks: int = 40) -> tuple[DraftModel, PagedDraftModel]:
    """Both models over the same weights."""
    draft = write_draft(folder / "draft", config, draft_tensors(config))
    network = DraftNetwork.load(draft, write_target(folder / "target"), torch.float32, torch.device("cpu"))
    return DraftModel(network), PagedDraftModel(network, DrafterMetrics(CollectorRegistry()), blocks, BLOCK_TOKENS)


def features(sequence: int, count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(sequence))


def primed(model: ServedModel[KV], sequence: int, length: int) -> KV:
    """A context of so many positions, written in pieces of 7."""
    kv, rows = model.new_context(), features(sequence, length)
    for start in range(0, length, 7):
        piece = rows[start : start + 7]
        assert model.reserve(kv, start + len(piece))
        model.write_context([ContextRows(kv, start, piece)])
    return kv


def assert_same(ours: Draft, expected: Draft) -> None:
    assert (ours.tokens, ours.parents) == (expected.tokens, expected.parents)
    assert ours.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_static_step_drafts_what_the_model_drafts(name: str, tmp_path: Path) -> None:
    """Blocks and trees of any size, in batches of mixed lengths around the borders of pages and windows, one batch
    after another through the same buffers."""
    whole, paged = load(tmp_path, CONFIGS[name])
    generator = random.Random(name)
    lengths = [1, 4, 5, 15, 16, 17, 40, 63, 70]
    contexts = [(primed(whole, i, n), primed(paged, i, n), n) for i, n in enumerate(lengths)]
    for size, shapes in ((1, "b"), (1, "t"), (3, "bt"), (9, "bt"), (2, "b"), (5, "t"), (1, "b")):
        ours: list[BlockRequest[PagedContext]] = []
        expected: list[BlockRequest[ContextKV]] = []
        for a, b, base in generator.sample(contexts, size):
            shape = DraftShape.TREE if generator.choice(shapes) == "t" else DraftShape.BLOCK
            nodes, anchor = generator.randint(1, 30), generator.randrange(VOCAB)
            expected.append(BlockRequest(a, base, anchor, nodes, shape))
            ours.append(BlockRequest(b, base, anchor, nodes, shape))
        for draft, other in zip(paged.draft(ours), whole.draft(expected), strict=True):
            assert_same(draft, other)


def test_reduced_head(tmp_path: Path) -> None:
    """Proposals carry the target's token ids."""
    tokens = torch.arange(3, 510, 11)
    config = draft_config()
    tensors = draft_tensors(config) | {"d2t": tokens - torch.arange(len(tokens))}
    draft = write_draft(tmp_path / "draft", config | {"draft_vocab_size": len(tokens)}, tensors)
    network = DraftNetwork.load(draft, write_target(tmp_path / "target"), torch.float32, torch.device("cpu"))
    whole, paged = DraftModel(network), PagedDraftModel(network, DrafterMetrics(CollectorRegistry()), 20, BLOCK_TOKENS)
    for nodes, shape in ((7, DraftShape.BLOCK), (25, DraftShape.TREE)):
        (expected,) = whole.draft([BlockRequest(primed(whole, 1, 33), 33, 17, nodes, shape)])
        assert_same(paged.draft([BlockRequest(primed(paged, 1, 33), 33, 17, nodes, shape)])[0], expected)


def test_more_requests_than_a_step_has_room_for(tmp_path: Path) -> None:
    """Take several steps; each gets its own draft."""
    whole, paged = load(tmp_path, draft_config(), blocks=80)
    requests, expected = [], []
    for i in range(35):
        requests.append(BlockRequest(primed(paged, i, 3 + i % 4), 3 + i % 4, i, 7))
        expected.append(BlockRequest(primed(whole, i, 3 + i % 4), 3 + i % 4, i, 7))
    for draft, other in zip(paged.draft(requests), whole.draft(expected), strict=True):
        assert_same(draft, other)


def test_positions_that_come_twice_hold_the_last_features(tmp_path: Path) -> None:
    """Also in one write."""
    whole, paged = load(tmp_path, draft_config())
    kv = paged.new_context()
    assert paged.reserve(kv, 12)
    wrong, right = features(7, 12), features(8, 12)
    paged.write_context([ContextRows(kv, 0, wrong), ContextRows(kv, 4, right[4:]), ContextRows(kv, 0, right[:6])])
    (expected,) = whole.draft([BlockRequest(primed(whole, 8, 12), 12, 5, 7)])
    assert_same(paged.draft([BlockRequest(kv, 12, 5, 7)])[0], expected)


class FailingDriver:
    """Captures, except what it is told to fail at, counted from 0."""

    captures = True

    def __init__(self, capture: int | None = None, replay: int | None = None):
        self._capture, self._replay = capture, replay
        self._captures = self._replays = 0

    def warm_up(self, step: Step) -> None:
        step()

    def capture(self, step: Step) -> Step:
        self._captures += 1
        if self._captures - 1 == self._capture:
            raise RuntimeError("an operation that cannot be captured")
        return partial(self._run, step)

    def release(self) -> None: ...

    def _run(self, step: Step) -> None:
        self._replays += 1
        if self._replays - 1 == self._replay:
            raise RuntimeError("the device says no")
        step()


@pytest.mark.parametrize(
    ("fault", "replays", "fallbacks"),
    [({}, 4, {}), ({"capture": 10}, 2, {"capture": 2}), ({"replay": 2}, 2, {"replay": 2})],
)
def test_step_without_a_graph_drafts_the_same(
    fault: dict[str, int], replays: int, fallbacks: dict[str, int], tmp_path: Path
) -> None:
    """A step that cannot be captured, or whose replay fails, runs uncaptured, and both kinds are counted."""
    registry = CollectorRegistry()
    folder = write_draft(tmp_path / "draft", draft_config(), draft_tensors(draft_config()))
    network = DraftNetwork.load(folder, write_target(tmp_path / "target"), torch.float32, torch.device("cpu"))
    whole = DraftModel(network)
    paged = PagedDraftModel(network, DrafterMetrics(registry), 20, BLOCK_TOKENS, driver=FailingDriver(**fault))
    for anchor, requests in enumerate((1, 1, 2, 2)):
        ours = [BlockRequest(primed(paged, i, 20), 20, anchor, 7) for i in range(requests)]
        expected = [BlockRequest(primed(whole, i, 20), 20, anchor, 7) for i in range(requests)]
        for draft, other in zip(paged.draft(ours), whole.draft(expected), strict=True):
            assert_same(draft, other)
    counted = {(s.name, *s.labels.values()): s.value for m in registry.collect() for s in m.samples}
    assert sum(v for k, v in counted.items() if k[0] == "tandem_drafter_graph_replays_total") == replays
    found = {k[1]: v for k, v in counted.items() if k[0] == "tandem_drafter_graph_fallbacks_total" and v}
    assert found == fallbacks
    assert counted["tandem_drafter_graph_buckets", "false"] == len(fallbacks)
    assert counted["tandem_drafter_graph_buckets", "true"] == len(paged.buckets) - len(fallbacks)


def test_capture_can_be_demanded(tmp_path: Path) -> None:
    """Without eager_fallback a drafter whose step cannot be captured does not start."""
    folder = write_draft(tmp_path / "draft", draft_config(), draft_tensors(draft_config()))
    network = DraftNetwork.load(folder, write_target(tmp_path / "target"), torch.float32, torch.device("cpu"))
    metrics = DrafterMetrics(CollectorRegistry())
    with pytest.raises(StartupError, match="cannot be captured"):
        PagedDraftModel(network, metrics, 20, BLOCK_TOKENS, eager_fallback=False, driver=FailingDriver(capture=0))


@pytest.mark.parametrize(("mode", "kind"), [("on", PagedDraftModel), ("auto", DraftModel), ("off", DraftModel)])
def test_config_chooses_the_model(mode: str, kind: type, tmp_path: Path) -> None:
    """On a CPU only `on` takes steps of fixed shape."""
    draft = write_draft(tmp_path / "draft", draft_config(), draft_tensors(draft_config()))
    section = DrafterConfig.model_validate(
        {"device": "cpu", "dtype": "float32", "graphs": {"mode": mode}, "kv_blocks": 40, "kv_block_tokens": 16}
    )
    target = write_target(tmp_path / "target")
    model = load_draft_model(draft, target, section, DrafterMetrics(CollectorRegistry()))
    assert type(model) is kind
    if isinstance(model, PagedDraftModel):
        assert model.blocks.used == 0, "warming up leaves nothing behind"


class World:
    """A drafter with few blocks, and a verifier that sends what it is asked for."""

    def __init__(self, folder: Path, blocks: int):
        self.registry = CollectorRegistry()
        self.whole, self.model = load(folder, draft_config(), blocks)
        self._drafter = Drafter(self.model, "float32", DrafterMetrics(self.registry))
        self._sent: dict[int, int] = {}
        self.now = 0.0
        self.model.blocks._clock = lambda: self.now

    def draft(self, sequence: int, base: int) -> list[int] | Gap:
        """A round for a sequence; after a gap its features are sent anew, as a verifier does."""
        start = self._sent.get(sequence, 0)
        data = features(sequence, 100)[start:base].numpy().tobytes()
        contexts = [Context(sequence, 0, start, base - start, data)] if base > start else []
        answer = self._drafter.work([Round(contexts, [DraftRequest(sequence, 0, base, 9, 7)], [])])
        self._sent[sequence] = base
        assert len(answer.drafts) + len(answer.gaps) == 1, "a request without an answer costs a timeout"
        if answer.gaps:
            self._sent[sequence] = answer.gaps[0].held_positions
            return answer.gaps[0]
        return answer.drafts[0].draft.tokens

    def release(self, sequence: int) -> None:
        self._drafter.work([Round([], [], [sequence])])

    def expected(self, sequence: int, base: int) -> list[int]:
        return self.whole.draft([BlockRequest(primed(self.whole, sequence, base), base, 9, 7)])[0].tokens


def test_idle_context_makes_room_and_is_asked_for_again(tmp_path: Path) -> None:
    """Its next request is answered with a gap from 0 on; once sent, it is drafted for as before."""
    world = World(tmp_path, blocks=6)
    assert world.draft(1, 40) == world.expected(1, 40)
    world.now += 2 * IDLE_SECONDS
    assert world.draft(2, 40) == world.expected(2, 40)
    world.now += 2 * IDLE_SECONDS
    assert world.draft(1, 44) == Gap(1, 0, 0)
    assert world.draft(1, 44) == world.expected(1, 44)
    assert world.registry.get_sample_value("tandem_drafter_context_gaps_total") == 1


def test_more_sequences_than_fit_get_no_drafts_and_no_gaps(tmp_path: Path) -> None:
    """Those that hold their contexts go on being drafted; who comes too late is answered at once, with nothing, and
    gets drafts as soon as there is room."""
    world = World(tmp_path, blocks=6)
    for base in range(40, 50):
        assert world.draft(1, base) == world.expected(1, base)
        assert world.draft(2, base) == []
        world.now += IDLE_SECONDS / 4
    world.release(1)
    assert world.draft(2, 50) == Gap(2, 0, 0)
    assert world.draft(2, 50) == world.expected(2, 50)
    world.release(2)
    assert world.model.blocks.used == 0


def test_sequence_longer_than_all_blocks_is_answered_with_nothing(tmp_path: Path) -> None:
    """For as long as it lives, however long it grows, without asking for its features again and again."""
    world = World(tmp_path, blocks=4)
    drafted = [world.draft(1, base) for base in (20, 39, 40, 41, 60, 61)]
    assert [len(tokens) for tokens in drafted if isinstance(tokens, list)] == [7, 7, 7, 0, 0, 0]


def test_chunk_without_room_in_the_middle_of_a_round_is_left_out(tmp_path: Path) -> None:
    """A context whose second chunk finds no room is dropped with its first, which was to be written in the same go."""
    world = World(tmp_path, blocks=4)
    rows = features(1, 60)
    contexts = [Context(1, 0, 0, 30, rows[:30].numpy().tobytes()), Context(1, 0, 30, 30, rows[30:].numpy().tobytes())]
    answer = world._drafter.work([Round(contexts, [DraftRequest(1, 0, 60, 9, 7)], [])])
    assert (len(answer.drafts[0].draft), answer.gaps) == (0, [])
    assert world.model.blocks.used == 0
