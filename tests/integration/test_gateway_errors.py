"""Every bad input ends in a status that names the field and what is allowed; nothing runs, and the gateway stays up."""

import math
import re
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from tandem.client import GenerationError, Message
from tandem.errors import Overloaded, invalid
from tandem.rpc import field_violations
from tandem.v1 import generation_pb2
from tests.fakes import tokenizers
from tests.fakes.fake_verifier import FakeVerifier
from tests.fakes.gateway_stack import GatewayStack, gateway_stack

CONTEXT, VOCAB = 128, 512
Request = generation_pb2.GenerateRequest


@pytest.fixture
async def stack() -> AsyncIterator[GatewayStack]:
    async with gateway_stack(shutdown_grace_seconds=0.2) as running:
        yield running


# (arguments of Client.generate, field, what the reason must say)
BAD: list[tuple[dict[str, object], str, str]] = [
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "exactly one of prompt, messages and token_ids must be set; none is"),
    ({"prompt": [1] * CONTEXT}, "token_ids", f"has {CONTEXT} tokens; the context holds {CONTEXT}"),
    ({"prompt": "a b " * 300}, "prompt", rf"has \d+ tokens; the context holds {CONTEXT}"),
    ({"prompt": [Message("user", "a b " * 300)]}, "messages", rf"has \d+ tokens; the context holds {CONTEXT}"),
    ({"prompt": "a b " * 500_000}, "prompt", f"has more than {CONTEXT} tokens; the context holds {CONTEXT}"),
    ({"prompt": [Message("user", "a b " * 500_000)]}, "messages", f"has more than {CONTEXT} tokens"),
    ({"prompt": [1, VOCAB, 2]}, "token_ids[1]", f"must be below {VOCAB}, is {VOCAB}"),
    ({"prompt": [-1]}, "token_ids[0]", r"must be in \[0, 2\^32\), is -1"),
    ({"prompt": ["a"]}, "token_ids[0]", "must be an integer"),
    ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
    ({"prompt": [Message("", "x")]}, "messages[0].role", "must be one of system, user, assistant, is ''"),
    ({"prompt": [Message("user", "x"), Message("robot", "x")]}, "messages[1].role", "is 'robot'"),
    ({"temperature": math.nan}, "sampling.temperature", r"must be in \[0, 100\], is nan"),
    ({"temperature": -0.5}, "sampling.temperature", r"must be in \[0, 100\], is -0.5"),
    ({"temperature": math.inf}, "sampling.temperature", r"must be in \[0, 100\], is inf"),
    ({"top_p": 0.0}, "sampling.top_p", r"must be in \(0, 1\], is 0.0"),
    ({"top_p": 1.5}, "sampling.top_p", "is 1.5"),
    ({"top_p": math.nan}, "sampling.top_p", "is nan"),
    ({"min_p": -0.25}, "sampling.min_p", r"must be in \[0, 1\], is -0.25"),
    ({"min_p": 2.0}, "sampling.min_p", "is 2.0"),
    ({"top_k": -1}, "sampling.top_k", r"must be in \[0, 2\^32\), is -1"),
    ({"seed": -1}, "sampling.seed", r"must be in \[0, 2\^64\), is -1"),
    ({"seed": 2**64}, "sampling.seed", r"must be in \[0, 2\^64\)"),
    ({"max_tokens": 0}, "stopping.max_tokens", "must be at least 1, is 0"),
    ({"max_tokens": -5}, "stopping.max_tokens", r"must be in \[0, 2\^32\), is -5"),
    ({"max_tokens": 2.5}, "stopping.max_tokens", "must be an integer, is 2.5"),
    ({"prompt": [5] * 100, "max_tokens": 29}, "stopping.max_tokens", "must be at most 28: the prompt has 100 tokens"),
    ({"stop": ["a"] * 17}, "stopping.stop_strings", "must be at most 16, are 17"),
    ({"stop": ["a", ""]}, "stopping.stop_strings[1]", "must have 1 to 256 characters, has 0"),
    ({"stop": ["é" * 257]}, "stopping.stop_strings[0]", "must have 1 to 256 characters, has 257"),
    ({"stop_token_ids": [3, VOCAB]}, "stopping.stop_token_ids[1]", f"must be below {VOCAB}"),
    ({"stop_token_ids": [3] * 2000}, "stopping.stop_token_ids", "must be at most 1024, are 2000"),
    ({"speculation_mode": "forest"}, "speculation_mode", "must be one of default, off, block, tree, auto, is 'forest'"),
    ({"max_draft_nodes": 0}, "max_draft_nodes", r"must be in \[1, 16\] on this server, is 0"),
    ({"max_draft_nodes": 17, "speculation_mode": "tree"}, "max_draft_nodes", r"must be in \[1, 16\].*is 17"),
    ({"max_draft_nodes": 17, "speculation_mode": "off"}, "max_draft_nodes", r"must be in \[1, 16\].*is 17"),
    ({"max_draft_nodes": -1}, "max_draft_nodes", r"must be in \[0, 2\^32\), is -1"),
    ({"template_flags": {"thinking": True}}, "template_flags", "is for messages"),
    ({"template_flags": {"thinking": 1}}, "template_flags", "'thinking' must be a bool, is 1"),
    (
        {"prompt": [Message("user", "x")], "template_flags": {"thinking": True}},
        "template_flags",
        "does not read 'thinking'; it reads: none",
    ),
    ({"prompt": "x", "session_id": "s"}, "prompt", "cannot be added to a session; use messages"),
    ({"prompt": [3], "session_id": "s"}, "token_ids", "cannot be added to a session; use messages"),
]


@pytest.mark.parametrize(("arguments", "field", "reason"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_arguments_are_named(
    stack: GatewayStack, arguments: dict[str, object], field: str, reason: str
) -> None:
    """Whether the server refuses them or the client cannot even send them."""
    with pytest.raises(GenerationError) as caught:
        await stack.client.generate(**{"prompt": "hello", **arguments}).result()  # type: ignore[arg-type]
    assert caught.value.code == "INVALID_ARGUMENT"
    ((found_field, found_reason),) = caught.value.violations
    assert found_field == field
    assert re.search(reason, found_reason), found_reason
    assert not stack.verifier.requests
    assert await stack.health() == "SERVING"


def both(request: Request) -> None:
    request.prompt = "a"
    request.messages.add(role="user", content="b")


def all_three(request: Request) -> None:
    both(request)
    request.token_ids.append(3)


def unknown_mode(request: Request) -> None:
    request.prompt = "a"
    request.speculation_mode = 99  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("fill", "fields"),
    [(both, ["messages"]), (all_three, ["messages", "token_ids"]), (unknown_mode, ["speculation_mode"])],
)
async def test_what_only_raw_grpc_can_send(
    stack: GatewayStack, fill: Callable[[Request], None], fields: list[str]
) -> None:
    request = Request()
    fill(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in stack.stub.Generate(request)]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [field for field, _ in field_violations(caught.value)] == fields


async def test_all_violations_are_reported_at_once(stack: GatewayStack) -> None:
    with pytest.raises(GenerationError) as caught:
        await stack.client.generate(
            [Message("robot", "x")], temperature=-1, top_p=2, min_p=3, max_tokens=0, stop=[""], stop_token_ids=[VOCAB]
        ).result()
    assert [field for field, _ in caught.value.violations] == [
        "messages[0].role",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.min_p",
        "stopping.max_tokens",
        "stopping.stop_strings[0]",
        "stopping.stop_token_ids[0]",
    ]


async def test_very_many_violations_still_fit_a_status(stack: GatewayStack) -> None:
    """A status travels in headers: it must not grow with the request."""
    with pytest.raises(GenerationError) as caught:
        await stack.client.generate([VOCAB] * 100_000).result()
    assert caught.value.code == "INVALID_ARGUMENT"
    assert len(caught.value.violations) == 10


async def test_an_oversized_request_is_refused_unread(stack: GatewayStack) -> None:
    """50 MB, above max_request_bytes: RESOURCE_EXHAUSTED, and the gateway goes on."""
    with pytest.raises(GenerationError) as caught:
        await stack.client.generate("x" * 50_000_000).result()
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert (await stack.client.generate("hello", max_tokens=3).result()).completion_tokens == 3


async def test_a_speculation_mode_the_verifier_lacks_is_refused() -> None:
    """A verifier without a draft model decodes plainly and says so."""
    verifier = FakeVerifier(speculation_modes=[generation_pb2.SPECULATION_MODE_OFF], max_draft_nodes=0)
    async with gateway_stack(verifier) as stack:
        with pytest.raises(GenerationError) as caught:
            await stack.client.generate("hello", speculation_mode="tree", max_draft_nodes=4).result()
        assert caught.value.violations == [
            ("speculation_mode", "must be one of default, off on this server, is tree"),
            ("max_draft_nodes", "must not be set: this server does not speculate; is 4"),
        ]
        final = await stack.client.generate("hello", max_tokens=2, speculation_mode="off").result()
        assert final.completion_tokens == 2


async def test_an_argument_that_does_not_exist_is_a_type_error(stack: GatewayStack) -> None:
    """As Python's own signatures say it: a misspelt option must not be ignored."""
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'max_token'"):
        stack.client.generate("hello", max_token=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (Overloaded("257 sequences wait", 2.5), "RESOURCE_EXHAUSTED", "257 sequences wait"),
        (invalid("token_ids", "must be nice"), "INVALID_ARGUMENT", "must be nice"),
        ((grpc.StatusCode.INTERNAL, "the step failed"), "INTERNAL", "the step failed"),
    ],
)
async def test_what_the_verifier_refuses_is_passed_on(
    stack: GatewayStack, error: Exception | tuple[grpc.StatusCode, str], code: str, says: str
) -> None:
    stack.verifier.error = error
    with pytest.raises(GenerationError, match=says) as caught:
        await stack.client.generate("hello").result()
    assert caught.value.code == code
    assert caught.value.retry_after_seconds == (2.5 if isinstance(error, Overloaded) else None)
    assert caught.value.violations == ([("token_ids", "must be nice")] if code == "INVALID_ARGUMENT" else [])


async def test_tokenize_and_sessions_check_their_fields(stack: GatewayStack) -> None:
    client = stack.client
    with pytest.raises(GenerationError, match="exactly one of prompt and messages must be set"):
        await client.tokenize([])
    with pytest.raises(GenerationError, match=r"messages\[0\].role"):
        await client.tokenize([Message("x", "y")])
    with pytest.raises(GenerationError, match=r"messages\[0\].role"):
        await client.open_session([Message("x", "y")])
    with pytest.raises(GenerationError, match="ttl_seconds: must be at least 1, is 0"):
        await client.open_session(ttl_seconds=0)
    with pytest.raises(GenerationError, match="messages: has more than 128 tokens; the context holds 128"):
        await client.open_session([Message("system", "a b " * 20_000)])
    for call in (
        client.get_session("none"),
        client.close_session("none"),
        client.generate([Message("user", "x")], session_id="none").result(),
    ):
        with pytest.raises(GenerationError, match="session_id: there is no session 'none'") as caught:
            await call
        assert caught.value.code == "NOT_FOUND"


async def test_an_id_the_tokenizer_does_not_know_has_no_text(stack: GatewayStack) -> None:
    """Models pad their vocabularies: such ids are valid and decode to nothing."""
    stack.verifier.script = lambda request: [VOCAB - 1, *tokenizers.byte_level().encode("ab").ids]
    generation = stack.client.generate([VOCAB - 1], max_tokens=3)
    await generation.result()
    assert generation.text == "ab"
    assert generation.token_ids[0] == VOCAB - 1
