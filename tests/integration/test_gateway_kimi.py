"""A Kimi folder behind the gateway: its template's flags, its special ids, its image placeholder."""

from collections.abc import AsyncIterator

import pytest

from tandem.client import GenerationError, Message
from tests.fakes import kimi_folder as kimi
from tests.fakes.gateway_stack import GatewayStack, gateway_stack


@pytest.fixture
async def stack() -> AsyncIterator[GatewayStack]:
    async with gateway_stack(write_target=kimi.write_kimi) as running:
        yield running


async def test_a_template_flag_changes_the_prompt_for_this_request(stack: GatewayStack) -> None:
    turns = [Message("user", "hi <|im_end|>")]
    for flags, ending in (({}, [kimi.THINK]), ({"thinking": False}, [kimi.THINK, kimi.THINK_END])):
        await stack.client.generate(turns, max_tokens=1, template_flags=flags).result()
        sent = list(stack.verifier.requests[-1].token_ids)
        assert sent[-len(ending) - 1 :] == [kimi.IM_MIDDLE, *ending]
        assert sent.count(kimi.IM_END) == 1, "the template's; the user's is text"
        assert sent == await stack.client.tokenize(turns, flags)


async def test_a_flag_of_another_template_is_refused_with_those_there_are(stack: GatewayStack) -> None:
    """Other targets' key for the same thing is the likely mistake; ignored, it would think on unasked."""
    with pytest.raises(GenerationError, match="does not read 'enable_thinking'; it reads: thinking") as caught:
        await stack.client.generate([Message("user", "hi")], template_flags={"enable_thinking": False}).result()
    assert [field for field, _ in caught.value.violations] == ["template_flags"]


async def test_an_image_placeholder_is_refused(stack: GatewayStack) -> None:
    with pytest.raises(GenerationError, match="stands for an image or video; only text can be sent") as caught:
        await stack.client.generate([1, kimi.MEDIA]).result()
    assert caught.value.code == "INVALID_ARGUMENT"
    assert [field for field, _ in caught.value.violations] == ["token_ids[1]"]
