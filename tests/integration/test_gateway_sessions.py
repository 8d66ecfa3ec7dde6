"""Sessions over gRPC: what a generation leaves behind when it ends, is cancelled, or fails."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from tandem.client import GenerationError, Message
from tests.fakes import tokenizers
from tests.fakes.gateway_stack import GatewayStack, eventually, gateway_stack

RAW = tokenizers.byte_level()


def encode(text: str) -> list[int]:
    return RAW.encode(text, add_special_tokens=False).ids


@pytest.fixture
async def stack() -> AsyncIterator[GatewayStack]:
    async with gateway_stack(shutdown_grace_seconds=0.2, max_sessions=2) as running:
        running.verifier.script = lambda request: [*encode("fine"), tokenizers.EOS]
        yield running


async def test_a_conversation_is_rendered_from_its_history(stack: GatewayStack) -> None:
    """The second turn's prompt is what the whole conversation gives when sent at once."""
    client = stack.client
    session = await client.open_session([Message("system", "be brief")])
    await client.generate([Message("user", "how are you?")], session_id=session).result()
    await client.generate([Message("user", "sure?")], session_id=session).result()
    history = [
        Message("system", "be brief"),
        Message("user", "how are you?"),
        Message("assistant", "fine"),
        Message("user", "sure?"),
    ]
    assert list(stack.verifier.requests[1].token_ids) == await client.tokenize(history)
    state = await client.get_session(session)
    assert state.messages == [*history, Message("assistant", "fine")]
    assert not state.busy
    assert state.expires_at > 0


async def test_the_next_turn_can_follow_the_last_message_at_once(stack: GatewayStack) -> None:
    """Whoever reads `final` finds the session idle, even before the call's status arrives."""
    for _ in range(10):
        session = await stack.client.open_session()
        for _ in range(5):
            generation = stack.client.generate([Message("user", "x")], session_id=session, max_tokens=1)
            while not generation.token_ids:
                await anext(generation)
        assert len((await stack.client.get_session(session)).messages) == 10
        await stack.client.close_session(session)


async def test_a_cancelled_answer_is_kept_as_far_as_it_was_streamed(stack: GatewayStack) -> None:
    session = await stack.client.open_session()
    stack.verifier.stall_after = 3
    stack.verifier.script = lambda request: encode("abcdefgh")
    generation = stack.client.generate([Message("user", "go")], session_id=session)
    while len(generation.token_ids) < 3:
        await anext(generation)
    with pytest.raises(GenerationError, match="busy") as caught:
        await stack.client.generate([Message("user", "me too")], session_id=session).result()
    assert caught.value.code == "FAILED_PRECONDITION"
    assert (await stack.client.get_session(session)).busy
    generation.cancel()
    await eventually(lambda: stack.verifier.running == 0)
    state = await stack.client.get_session(session)
    assert state.messages == [Message("user", "go"), Message("assistant", RAW.decode(encode("abcdefgh")[:3]))]
    assert not state.busy


async def test_a_deadline_keeps_what_was_streamed_too(stack: GatewayStack) -> None:
    session = await stack.client.open_session()
    stack.verifier.stall_after = 3
    stack.verifier.script = lambda request: encode("abcdefgh")
    with pytest.raises(GenerationError, match="DEADLINE_EXCEEDED"):
        await stack.client.generate([Message("user", "go")], session_id=session, timeout=0.3).result()
    await eventually(lambda: stack.verifier.running == 0)
    messages = (await stack.client.get_session(session)).messages
    assert [message.role for message in messages] == ["user", "assistant"]


async def test_a_failure_or_a_cancellation_before_any_text_leaves_no_trace(stack: GatewayStack) -> None:
    session = await stack.client.open_session()
    stack.verifier.error = (grpc.StatusCode.INTERNAL, "broken")
    with pytest.raises(GenerationError, match="broken"):
        await stack.client.generate([Message("user", "go")], session_id=session).result()
    stack.verifier.error = None
    stack.verifier.stall_after = 0
    running = asyncio.create_task(stack.client.generate([Message("user", "go")], session_id=session).result())
    await eventually(lambda: stack.verifier.running == 1)
    running.cancel()
    await eventually(lambda: stack.verifier.running == 0)
    state = await stack.client.get_session(session)
    assert (state.messages, state.busy) == ([], False)


async def test_sessions_are_limited_and_closing_makes_room(stack: GatewayStack) -> None:
    first, _ = await stack.client.open_session(), await stack.client.open_session()
    with pytest.raises(GenerationError) as caught:
        await stack.client.open_session()
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert caught.value.retry_after_seconds == 60.0
    await stack.client.close_session(first)
    await stack.client.open_session()
    with pytest.raises(GenerationError, match="NOT_FOUND"):
        await stack.client.generate([Message("user", "x")], session_id=first).result()


async def test_a_history_beyond_the_context_names_messages(stack: GatewayStack) -> None:
    session = await stack.client.open_session([Message("system", "a b " * 20)])
    with pytest.raises(GenerationError) as caught:
        await stack.client.generate([Message("user", "a b " * 50)], session_id=session).result()
    ((field, reason),) = caught.value.violations
    assert field == "messages"
    assert "the context holds 128" in reason
