"""KV accounting: the books balance after any history, and prefixes are reused only when they are equal."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from verifier_service.kv_cache import PADDING_BLOCK, KvCache


class KvHistory(RuleBasedStateMachine):
    """Random opens, growth, commits and closes against a model of what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvCache(blocks=9, block_tokens=2)
        self.live: dict[int, tuple[list[int], int, bool]] = {}
        self.content: dict[int, tuple[tuple[int, ...], bool]] = {}
        self.next_id = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), features=st.booleans())
    def open(self, tokens: list[int], features: bool) -> None:
        reused = self.kv.open(self.next_id, tokens, features)
        assert reused < len(tokens), "the last token's row must be computed"
        for i, block in enumerate(self.kv.table(self.next_id)):
            prefix, has_features = self.content[block]
            assert prefix == tuple(tokens[: (i + 1) * 2]), "a reused block holds another prefix"
            assert has_features or not features, "a reused block lacks features"
        self.live[self.next_id] = (tokens, reused, features)
        self.next_id += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), extra=st.integers(0, 3))
    def grow(self, data: st.DataObject, extra: int) -> None:
        i = data.draw(st.sampled_from(sorted(self.live)))
        tokens, committed, features = self.live[i]
        before = list(self.kv.table(i))
        if not self.kv.reserve(i, len(tokens) + extra):
            assert self.kv.table(i) == before
            return
        assert PADDING_BLOCK not in self.kv.table(i)
        for index in range(committed // 2, len(tokens) // 2):
            self.content[self.kv.table(i)[index]] = (tuple(tokens[: (index + 1) * 2]), features)
        self.kv.commit(i, tokens, len(tokens), features)
        self.live[i] = (tokens, len(tokens), features)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from(sorted(self.live)))
        self.kv.close(i)
        del self.live[i]

    @invariant()
    def books_balance(self) -> None:
        self.kv.audit({i: committed for i, (_, committed, _) in self.live.items()})
        if not self.live:
            assert self.kv.used == 0


TestKvHistory = KvHistory.TestCase
TestKvHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_prefix_is_reused_after_its_sequence_ended_and_evicted_when_room_is_needed() -> None:
    kv = KvCache(blocks=5, block_tokens=2)
    kv.open(1, [1, 2, 3, 4, 5], False)
    assert kv.reserve(1, 5)
    kv.commit(1, [1, 2, 3, 4, 5], 5, True)
    kv.close(1)
    assert (kv.used, kv.cached) == (0, 2)
    assert kv.open(2, [1, 2, 3, 4, 9], True) == 4
    kv.close(2)
    kv.open(3, [7] * 8, False)
    assert kv.reserve(3, 8)
    assert kv.cached == 0
    kv.close(3)
    assert kv.open(4, [1, 2, 3, 4, 9], True) == 0


def test_blocks_without_features_are_replaced_by_blocks_with_them() -> None:
    kv = KvCache(blocks=9, block_tokens=2)
    for sequence_id, features in ((1, False), (2, True)):
        assert kv.open(sequence_id, [1, 2, 3], features) == 0
        assert kv.reserve(sequence_id, 3)
        kv.commit(sequence_id, [1, 2, 3], 3, features)
        kv.close(sequence_id)
    assert kv.open(3, [1, 2, 3], True) == 2
