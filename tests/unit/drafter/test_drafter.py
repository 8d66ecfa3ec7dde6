"""Rounds in, drafts and gaps out."""

import pytest
import torch
from prometheus_client import CollectorRegistry

from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.drafter import Drafter
from drafter_service.messages import Gap, ProtocolError
from drafter_service.metrics import DrafterMetrics
from tandem.speculation import Context, DraftRequest, DraftShape, Round
from tests.fakes.draft_folders import HIDDEN, VOCAB, draft_config, draft_tensors, write_draft, write_target

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DraftModel:
    folder, config = tmp_path_factory.mktemp("drafter"), draft_config()
    draft = write_draft(folder / "draft", config, draft_tensors(config))
    return DraftModel.load(draft, write_target(folder / "target"), torch.float32, torch.device("cpu"))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def drafter(model: DraftModel, registry: CollectorRegistry) -> Drafter:
    return Drafter(model, "float32", DrafterMetrics(registry))


def features(sequence: int) -> torch.Tensor:
    return torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(sequence))


def context(sequence: int, start: int, count: int, epoch: int = 0) -> Context:
    data = features(sequence)[start : start + count].numpy().tobytes()
    return Context(sequence, epoch, start, count, data)


def request(
    sequence: int,
    base: int,
    epoch: int = 0,
    max_nodes: int = 7,
    anchor: int = 9,
    shape: DraftShape = DraftShape.BLOCK,
) -> DraftRequest:
    return DraftRequest(sequence, epoch, base, anchor, max_nodes, shape)


def expected_tokens(model: DraftModel, sequence: int, base: int, anchor: int = 9, nodes: int = 7) -> list[int]:
    kv = model.new_context()
    model.write_context([ContextRows(kv, 0, features(sequence)[:base])])
    return model.draft([BlockRequest(kv, base, anchor, nodes)])[0].tokens


def test_several_rounds_are_one_batch(drafter: Drafter, model: DraftModel, registry: CollectorRegistry) -> None:
    """Contexts and requests of several rounds give the drafts each would give alone, in one forward."""
    answer = drafter.work(
        [
            Round([context(1, 0, 10), context(2, 0, 3)], [request(1, 10)], []),
            Round([context(2, 3, 5)], [request(2, 8, max_nodes=3)], []),
            Round([context(3, 0, 1)], [], []),
        ]
    )
    assert [(d.sequence_id, d.epoch, d.base_position) for d in answer.drafts] == [(1, 0, 10), (2, 0, 8)]
    assert answer.drafts[0].draft.tokens == expected_tokens(model, 1, 10)
    assert answer.drafts[1].draft.tokens == expected_tokens(model, 2, 8, nodes=3)
    assert answer.gaps == []
    assert answer.compute_us > 0
    for draft in answer.drafts:
        draft.draft.check(VOCAB, 7)
        assert draft.draft.is_chain
        assert all(log_prob <= 0 for log_prob in draft.draft.log_probs)
    assert registry.get_sample_value("tandem_drafter_forward_seconds_count") == 1
    assert registry.get_sample_value("tandem_drafter_drafts_total") == 2
    assert registry.get_sample_value("tandem_drafter_draft_tokens_total") == 10
    assert registry.get_sample_value("tandem_drafter_context_positions_total") == 19
    assert registry.get_sample_value("tandem_drafter_rounds_total") == 3
    assert registry.get_sample_value("tandem_drafter_sequences") == 3


def test_more_nodes_than_a_block_has_are_cut(drafter: Drafter) -> None:
    """A verifier may ask for more than the block holds."""
    answer = drafter.work([Round([context(1, 0, 4)], [request(1, 4, max_nodes=99)], [])])
    assert len(answer.drafts[0].draft) == 7


def test_each_request_gets_its_shape(drafter: Drafter, model: DraftModel, registry: CollectorRegistry) -> None:
    """Blocks and trees, each within its own max_nodes, come of one forward."""
    contexts = [context(1, 0, 10), context(2, 0, 8), context(3, 0, 6)]
    requests = [
        request(1, 10, max_nodes=20, shape=DraftShape.TREE),
        request(2, 8, max_nodes=4),
        request(3, 6, max_nodes=16, shape=DraftShape.TREE),
    ]
    drafts = {d.sequence_id: d.draft for d in drafter.work([Round(contexts, requests, [])]).drafts}
    assert {sequence: len(draft) for sequence, draft in drafts.items()} == {1: 20, 2: 4, 3: 16}
    assert drafts[2].tokens == expected_tokens(model, 2, 8, nodes=4)
    assert drafts[2].is_chain
    for sequence in (1, 3):
        drafts[sequence].check(VOCAB, 20)
        kv = model.new_context()
        base = {1: 10, 3: 6}[sequence]
        model.write_context([ContextRows(kv, 0, features(sequence)[:base])])
        alone = model.draft([BlockRequest(kv, base, 9, len(drafts[sequence]), DraftShape.TREE)])[0]
        assert drafts[sequence].tokens == alone.tokens
        assert drafts[sequence].parents == alone.parents
    assert registry.get_sample_value("tandem_drafter_forward_seconds_count") == 1
    assert registry.get_sample_value("tandem_drafter_draft_tokens_total") == 40


def test_trees_have_a_size_limit(drafter: Drafter) -> None:
    """No request keeps a drafter busy for long, whatever it asks for."""
    huge = request(1, 4, max_nodes=2**32 - 1, shape=DraftShape.TREE)
    answer = drafter.work([Round([context(1, 0, 4)], [huge], [])])
    assert len(answer.drafts[0].draft) == 1024


def test_gaps_are_reported_once_and_filled(drafter: Drafter, model: DraftModel) -> None:
    """A request without its features is answered with what is held; with the features sent again, with the draft."""
    answer = drafter.work([Round([context(1, 0, 4)], [], []), Round([context(1, 6, 2)], [request(1, 8)], [])])
    assert (answer.drafts, answer.gaps) == ([], [Gap(1, 0, 4)])
    answer = drafter.work([Round([context(1, 4, 4)], [request(1, 8)], [])])
    assert answer.gaps == []
    assert answer.drafts[0].draft.tokens == expected_tokens(model, 1, 8)


def test_replayed_features_change_no_draft(drafter: Drafter, model: DraftModel) -> None:
    """Features that come twice, also behind a draft, leave the same context."""
    drafter.work([Round([context(1, 0, 9)], [request(1, 9)], [])])
    answer = drafter.work([Round([context(1, 2, 10), context(1, 0, 5)], [request(1, 12)], [])])
    assert answer.drafts[0].draft.tokens == expected_tokens(model, 1, 12)


def test_restarted_sequence_drafts_from_its_new_context(drafter: Drafter, model: DraftModel) -> None:
    """A later epoch's features replace the old ones; requests of the old epoch are not served."""
    drafter.work([Round([context(1, 0, 20)], [], [])])
    new = Context(1, 1, 0, 6, features(2)[:6].numpy().tobytes())
    answer = drafter.work([Round([new], [request(1, 6, epoch=1)], [])])
    assert answer.drafts[0].draft.tokens == expected_tokens(model, 2, 6)
    answer = drafter.work([Round([], [request(1, 20)], [])])
    assert (answer.drafts, answer.gaps) == ([], [])


def test_last_request_of_a_sequence_is_served(drafter: Drafter, model: DraftModel) -> None:
    """A request that is overtaken before it was served costs no forward and gets no answer."""
    first = Round([context(1, 0, 4)], [request(1, 4)], [])
    second = Round([context(1, 4, 1)], [request(1, 5)], [])
    answer = drafter.work([first, second])
    assert [d.base_position for d in answer.drafts] == [5]
    assert answer.drafts[0].draft.tokens == expected_tokens(model, 1, 5)


def test_released_sequence_is_neither_drafted_nor_held(drafter: Drafter, registry: CollectorRegistry) -> None:
    """A release that arrives with the request ends it, and the context is freed."""
    answer = drafter.work([Round([context(1, 0, 4)], [request(1, 4)], []), Round([], [], [1])])
    assert (answer.drafts, answer.gaps) == ([], [])
    assert registry.get_sample_value("tandem_drafter_sequences") == 0


def test_bfloat16_features(model: DraftModel) -> None:
    """Features are read in the dtype that the verifier announced."""
    drafter = Drafter(model, "bfloat16", DrafterMetrics(CollectorRegistry()))
    rows = features(1)[:5].bfloat16()
    data = rows.view(torch.int16).numpy().tobytes()
    answer = drafter.work([Round([Context(1, 0, 0, 5, data)], [request(1, 5)], [])])
    kv = model.new_context()
    model.write_context([ContextRows(kv, 0, rows.float())])
    assert answer.drafts[0].draft.tokens == model.draft([BlockRequest(kv, 5, 9, 7)])[0].tokens


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Round([Context(1, 0, 0, 2, b"\0" * (2 * HIDDEN * 4 - 1))], [], []), "contexts.features"),
        (Round([Context(1, 0, 0, 0, b"\0")], [], []), "contexts.features"),
        (Round([], [request(1, 0, anchor=VOCAB)], []), "requests.anchor: must be below vocab_size 512"),
        (Round([], [request(1, 0, max_nodes=0)], []), "requests.max_nodes"),
    ],
)
def test_protocol_errors_name_the_field(bad: Round, says: str, drafter: Drafter) -> None:
    """What breaks the protocol is refused by name, before anything is computed."""
    with pytest.raises(ProtocolError, match=says):
        drafter.work([bad])
