"""`tandem chat` against a gateway without a model."""

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from tandem.cli.main import app
from tandem.v1 import generation_pb2 as pb
from tests.fakes.fake_gateway import FakeGateway


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as running:
        yield running


def chat(gateway: FakeGateway, *lines: str, options: tuple[str, ...] = ()) -> Result:
    typed = "".join(f"{line}\n" for line in lines)
    return CliRunner().invoke(app, ["chat", "--address", gateway.address, *options], input=typed)


def test_turns_share_one_session_that_is_closed_at_the_end(gateway: FakeGateway) -> None:
    result = chat(gateway, "first question", "", "second question", "/exit", "never sent")
    assert result.exit_code == 0
    first, second = gateway.requests
    assert first.session_id == second.session_id != ""
    assert [m.content for m in second.messages] == ["second question"]
    assert "first question" in result.stdout
    assert gateway.sessions == {}


def test_options_and_system_message_hold_for_the_whole_conversation(gateway: FakeGateway) -> None:
    chat(
        gateway,
        "a b c",
        "/reset",
        "d e f",
        options=(
            *("--system", "Be brief.", "--temperature", "0", "--max-tokens", "2"),
            *("--speculation-mode", "auto", "--max-draft-nodes", "3"),
        ),
    )
    assert [[m.content for m in request.messages] for request in gateway.opened] == [["Be brief."], ["Be brief."]]
    one, two = gateway.requests
    assert one.session_id != two.session_id
    for request in (one, two):
        assert request.sampling.HasField("temperature")
        assert request.stopping.max_tokens == 2
        assert (request.speculation_mode, request.max_draft_nodes) == (pb.SPECULATION_MODE_AUTO, 3)
    assert gateway.sessions == {}


def test_stats_are_of_the_last_answer(gateway: FakeGateway) -> None:
    result = chat(gateway, "/stats", "a b c d", "/stats", options=("--speculation-mode", "block"))
    before, after = result.stdout.split("a b c d")
    assert "no answer yet" in before
    assert "acceptance length 3.00" in after


def test_an_unknown_command_is_not_sent(gateway: FakeGateway) -> None:
    result = chat(gateway, "/frobnicate")
    assert gateway.requests == []
    assert result.stdout.count("/reset") == 2


def test_a_failed_turn_is_told_and_the_conversation_goes_on(gateway: FakeGateway) -> None:
    result = chat(gateway, "overloaded", "hello")
    assert result.exit_code == 0
    assert "RESOURCE_EXHAUSTED" in result.stderr
    assert "hello" in result.stdout


def test_an_expired_session_is_replaced_and_the_user_is_told(gateway: FakeGateway) -> None:
    gateway.before_generate = lambda request: gateway.sessions.clear() if not gateway.requests else None
    result = chat(gateway, "lost", "kept")
    assert result.exit_code == 0
    assert "expired" in result.stderr
    assert gateway.requests[0].session_id != gateway.requests[1].session_id


def test_no_gateway_is_one_clear_line_and_exit_1() -> None:
    result = CliRunner().invoke(app, ["chat", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.stderr
