"""Rounds of token ids in, drafts and gaps out."""

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from drafter_service.messages import Gap, ProtocolError
from drafter_service.metrics import DrafterMetrics
from drafter_service.ngram_drafter import NgramDrafter
from tandem.config import DrafterConfig
from tandem.draft_tree import Draft
from tandem.speculation import Context, DraftRequest, DraftShape, Round

VOCAB = 100
TEXT = [*range(10, 40), 1, 2, 3, *range(10, 20)]
"""Its continuation behind 20 is 21, 22, ..."""


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def drafter(registry: CollectorRegistry) -> NgramDrafter:
    section = DrafterConfig(draft_source="ngram", ngram_block_size=8)
    return NgramDrafter(section, VOCAB, DrafterMetrics(registry))


def context(sequence: int, start: int, tokens: list[int], epoch: int = 0) -> Context:
    return Context(sequence, epoch, start, len(tokens), b"", tuple(tokens))


def request(
    sequence: int, base: int, anchor: int = 20, epoch: int = 0, nodes: int = 5, shape: DraftShape = DraftShape.BLOCK
) -> DraftRequest:
    return DraftRequest(sequence, epoch, base, anchor, nodes, shape)


def test_several_rounds_are_one_batch(drafter: NgramDrafter, registry: CollectorRegistry) -> None:
    """Each sequence is drafted from its own text; one with nothing to propose is answered too."""
    answer = drafter.work(
        [
            Round([context(1, 0, TEXT[:20]), context(2, 0, [5, 6])], [request(2, 2)], []),
            Round([context(1, 20, TEXT[20:])], [request(1, len(TEXT))], []),
        ]
    )
    assert {(d.sequence_id, d.epoch, d.base_position): d.draft.tokens for d in answer.drafts} == {
        (1, 0, len(TEXT)): [21, 22, 23, 24, 25],
        (2, 0, 2): [],
    }
    assert answer.gaps == []
    assert registry.get_sample_value("tandem_drafter_drafts_total") == 2
    assert registry.get_sample_value("tandem_drafter_empty_drafts_total") == 1
    assert registry.get_sample_value("tandem_drafter_draft_tokens_total") == 5
    assert registry.get_sample_value("tandem_drafter_context_positions_total") == len(TEXT) + 2
    assert registry.get_sample_value("tandem_drafter_sequences") == 2


def test_a_block_is_cut_to_its_size_and_a_tree_is_not(drafter: NgramDrafter) -> None:
    for shape, nodes in ((DraftShape.BLOCK, 7), (DraftShape.TREE, 12)):
        answer = drafter.work([Round([context(1, 0, [7] * 30)], [request(1, 30, anchor=7, nodes=12, shape=shape)], [])])
        assert len(answer.drafts[0].draft) == nodes


def test_a_gap_is_reported_and_filled(drafter: NgramDrafter) -> None:
    """The text sent again from the gap on, replays included, the draft is that of the whole text."""
    answer = drafter.work([Round([context(1, 0, TEXT[:9])], [], []), Round([context(1, 12, TEXT[12:])], [], [])])
    assert (answer.drafts, answer.gaps) == ([], [Gap(1, 0, 9)])
    answer = drafter.work([Round([], [request(1, len(TEXT))], [])])
    assert (answer.drafts, answer.gaps) == ([], [Gap(1, 0, 9)])
    answer = drafter.work([Round([context(1, 4, TEXT[4:15]), context(1, 2, TEXT[2:])], [request(1, len(TEXT))], [])])
    assert answer.gaps == []
    assert answer.drafts[0].draft.tokens == [21, 22, 23, 24, 25]


def test_a_later_epoch_forgets_the_text(drafter: NgramDrafter) -> None:
    """After a restart nothing of the old text is proposed, and the old epoch is not answered."""
    drafter.work([Round([context(1, 0, TEXT)], [], [])])
    answer = drafter.work([Round([context(1, 0, [19], epoch=1)], [request(1, 1, epoch=1)], [])])
    assert [d.draft for d in answer.drafts] == [Draft([], [], [])]
    answer = drafter.work([Round([], [request(1, len(TEXT), epoch=0)], [])])
    assert (answer.drafts, answer.gaps) == ([], [])


def test_a_released_sequence_is_forgotten(drafter: NgramDrafter, registry: CollectorRegistry) -> None:
    drafter.work([Round([context(1, 0, TEXT)], [], [])])
    answer = drafter.work([Round([], [], [1])])
    assert (answer.drafts, answer.gaps) == ([], [])
    assert registry.get_sample_value("tandem_drafter_sequences") == 0
    assert drafter.work([Round([], [request(1, len(TEXT))], [])]).gaps == [Gap(1, 0, 0)]


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (Round([Context(1, 0, 0, 3, b"", (1, 2))], [], []), "contexts.token_ids"),
        (Round([Context(1, 0, 0, 1, b"1234")], [], []), "contexts.token_ids"),
        (Round([], [request(1, 0, anchor=VOCAB)], []), "requests.anchor"),
        (Round([], [request(1, 0, nodes=0)], []), "requests.max_nodes"),
    ],
)
def test_protocol_errors_name_the_field(drafter: NgramDrafter, work: Round, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        drafter.work([work])


def test_no_torch_is_loaded() -> None:
    """An n-gram drafter runs where torch is not installed."""
    program = "import sys, drafter_service.app, drafter_service.ngram_drafter; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
