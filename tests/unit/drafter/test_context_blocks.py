"""Blocks of the paged context: none is held twice, none is lost, idle contexts make room."""

import gc

from hypothesis import given
from hypothesis import strategies as st

from drafter_service.context_blocks import IDLE_SECONDS, PADDING_BLOCK, ContextBlocks, PagedContext


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 90), st.floats(0, 2 * IDLE_SECONDS), st.booleans())))
def test_blocks_are_held_once_and_all_come_back(steps: list[tuple[int, int, float, bool]]) -> None:
    """Whatever is reserved, dropped and released: a context has blocks for what it reserved or is dropped and has none,
    no block is in two contexts, the padding block in none, and at zero contexts zero are in use."""
    clock = Clock()
    blocks = ContextBlocks(9, 16, clock=clock)
    contexts: dict[int, PagedContext] = {}
    for key, positions, seconds, release in steps:
        clock.now += seconds
        if release:
            contexts.pop(key, None)
            continue
        if key not in contexts:
            fits = blocks.has_room(positions)
            contexts[key] = blocks.new_context()
            assert blocks.reserve(contexts[key], positions) == fits
        else:
            kept = blocks.reserve(contexts[key], positions)
            assert kept != contexts[key].dropped
        assert contexts[key].dropped or len(contexts[key].blocks) * 16 >= positions
        held = [block for context in contexts.values() for block in context.blocks]
        assert len(set(held)) == len(held) == blocks.used
        assert PADDING_BLOCK not in held
        assert not any(context.blocks for context in contexts.values() if context.dropped)
    contexts.clear()
    assert blocks.used == 0


def test_longest_idle_context_makes_room_first() -> None:
    """And no more contexts are dropped than are needed."""
    clock, drops = Clock(), []
    blocks = ContextBlocks(7, 16, lambda: drops.append(None), clock)
    old, older, fresh = (blocks.new_context() for _ in range(3))
    for when, context in ((0.0, older), (0.5, old), (2.0, fresh)):
        clock.now = when
        assert blocks.reserve(context, 32)
    new = blocks.new_context()
    assert blocks.reserve(new, 20)
    assert older.dropped
    assert not old.dropped
    assert not fresh.dropped
    assert not blocks.reserve(older, 1), "a dropped context lacks what it held, so it never comes back"
    assert len(drops) == 1


def test_contexts_in_use_are_not_dropped_for_others() -> None:
    """Who comes too late goes without, instead of starting a circle of drops."""
    clock = Clock()
    blocks = ContextBlocks(5, 16, clock=clock)
    served = blocks.new_context()
    late = blocks.new_context()
    for _ in range(5):
        clock.now += IDLE_SECONDS / 2
        assert blocks.reserve(served, 48)
        assert not blocks.has_room(32)
        assert not blocks.reserve(late, 32)
    clock.now += IDLE_SECONDS
    assert blocks.has_room(32)


def test_contexts_longer_than_everything_are_refused_at_once() -> None:
    """Nobody else loses a context over one that cannot fit anyway."""
    clock = Clock()
    blocks = ContextBlocks(5, 16, clock=clock)
    idle = blocks.new_context()
    assert blocks.reserve(idle, 16)
    clock.now += 2 * IDLE_SECONDS
    assert not blocks.reserve(blocks.new_context(), 65)
    assert not idle.dropped


def test_blocks_of_a_context_come_back_with_its_last_reference() -> None:
    """No reference cycle delays that until a collection, which a service may have frozen."""
    gc.disable()
    try:
        blocks = ContextBlocks(5, 16)
        context = blocks.new_context()
        blocks.reserve(context, 40)
        assert blocks.used == 3
        del context
        assert blocks.used == 0
    finally:
        gc.enable()
