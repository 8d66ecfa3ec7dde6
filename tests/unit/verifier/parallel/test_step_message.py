"""A step arrives at the other ranks as rank 0 sent it."""

from hypothesis import given
from hypothesis import strategies as st

from verifier_service.parallel.step_message import pack, unpack
from verifier_service.step import RankStep, SegmentRows

numbers = st.integers(0, 2**31 - 1)
lists = st.lists(numbers, max_size=20)
segments = st.builds(
    SegmentRows,
    sequence_id=numbers,
    start=numbers,
    token_ids=st.lists(numbers, min_size=1, max_size=20),
    parents=st.lists(st.integers(-1, 2**31 - 1), max_size=20),
    blocks=lists,
)
steps = st.builds(
    RankStep,
    moves=st.lists(st.tuples(numbers, numbers), max_size=8),
    segments=st.lists(segments, max_size=5),
    logit_rows=lists,
)


@given(steps)
def test_unpacking_gives_what_was_packed(step: RankStep) -> None:
    assert unpack(pack(step)) == step
