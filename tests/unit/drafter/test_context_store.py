"""The bookkeeping of held positions: never a draft over positions that were not written."""

from hypothesis import given
from hypothesis import strategies as st

from drafter_service.context_store import ContextStore
from drafter_service.messages import Gap


def new_store() -> ContextStore[set[int]]:
    """Storage is the set of positions written, which the tests fill as the model would."""
    return ContextStore(set)


def write(store: ContextStore[set[int]], sequence: int, epoch: int, start: int, count: int) -> set[int] | Gap | None:
    storage = store.extend(sequence, epoch, start, count)
    if isinstance(storage, set):
        storage.update(range(start, start + count))
    return storage


def test_contexts_in_order_are_held() -> None:
    """Pieces of any size that follow each other add up."""
    store = new_store()
    for start, count in ((0, 5), (5, 1), (6, 0), (6, 10)):
        assert isinstance(write(store, 1, 0, start, count), set)
    assert store.behind(1, 0, 16) == set(range(16))


def test_gap_names_what_is_held_and_changes_nothing() -> None:
    """A piece beyond the end is refused; the piece that fits is then taken."""
    store = new_store()
    write(store, 1, 0, 0, 4)
    assert write(store, 1, 0, 5, 3) == Gap(1, 0, 4)
    assert store.behind(1, 0, 8) == Gap(1, 0, 4)
    assert store.behind(1, 0, 4) == set(range(4))


def test_unknown_sequence_is_a_gap_from_zero() -> None:
    """What a drafter without state is asked for: everything again."""
    store = new_store()
    assert write(store, 1, 3, 7, 2) == Gap(1, 3, 0)
    assert store.behind(2, 5, 9) == Gap(2, 5, 0)


def test_replays_change_nothing() -> None:
    """Positions that come again neither shorten nor lengthen what is held; an overlapping piece extends it."""
    store = new_store()
    write(store, 1, 0, 0, 10)
    assert isinstance(write(store, 1, 0, 2, 3), set)
    assert isinstance(store.behind(1, 0, 10), set)
    assert isinstance(write(store, 1, 0, 8, 4), set)
    assert isinstance(store.behind(1, 0, 12), set)


def test_later_epoch_starts_anew_and_earlier_ones_are_ignored() -> None:
    """After a restart nothing of the old epoch counts or is taken."""
    store = new_store()
    write(store, 1, 0, 0, 10)
    assert store.behind(1, 1, 10) == Gap(1, 1, 0)
    assert write(store, 1, 0, 10, 1) is None
    assert store.behind(1, 0, 10) is None
    assert isinstance(write(store, 1, 1, 0, 3), set)
    assert isinstance(store.behind(1, 1, 3), set)


def test_request_that_the_verifier_has_overtaken_is_dropped() -> None:
    """With more held than the request's base, its answer would be stale, and drafting would write over context."""
    store = new_store()
    write(store, 1, 0, 0, 10)
    assert store.behind(1, 0, 9) is None


def test_release_forgets() -> None:
    """A released id starts from nothing, at any epoch; unknown ids are no error."""
    store = new_store()
    write(store, 1, 4, 0, 10)
    store.release(1)
    store.release(99)
    assert len(store) == 0
    assert store.behind(1, 0, 10) == Gap(1, 0, 0)


_events = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 2), st.integers(0, 2), st.integers(0, 12), st.integers(0, 6)),
        st.tuples(st.just("draft"), st.integers(0, 2), st.integers(0, 2), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("release"), st.integers(0, 2), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(_events)
def test_no_draft_sees_a_position_of_another_epoch_or_none(events: list[tuple[str, int, int, int, int]]) -> None:
    """Whatever arrives in whatever order: a draft is allowed only where each position below its base was written in
    the request's own epoch since the last release."""
    store = new_store()
    written: dict[tuple[int, int], set[int]] = {}
    for kind, sequence, epoch, start, count in events:
        if kind == "write" and isinstance(store.extend(sequence, epoch, start, count), set):
            written.setdefault((sequence, epoch), set()).update(range(start, start + count))
        if kind == "draft" and isinstance(store.behind(sequence, epoch, start), set):
            assert written.get((sequence, epoch), set()) >= set(range(start))
        if kind == "release":
            store.release(sequence)
            written = {key: value for key, value in written.items() if key[0] != sequence}
