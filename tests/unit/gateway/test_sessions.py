"""Histories are kept, used sessions live on, unused ones expire, and a session runs one generation at a time."""

import pytest

from gateway.chat_template import Turn
from gateway.sessions import SessionBusy, SessionNotFound, Sessions
from tandem.errors import InvalidRequest, Overloaded

HELLO = Turn("user", "hello")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> Sessions:
    return Sessions(max_sessions=3, default_ttl_seconds=60, clock=clock)


def test_a_turn_and_its_answer_are_added_together(sessions: Sessions) -> None:
    session = sessions.open([Turn("system", "be brief")], None)
    with sessions.turn(session.session_id) as turn:
        assert turn.history == [Turn("system", "be brief")]
        assert sessions.get(session.session_id).turns == [Turn("system", "be brief")], "not yet"
        turn.commit([HELLO], "hi")
    assert sessions.get(session.session_id).turns == [Turn("system", "be brief"), HELLO, Turn("assistant", "hi")]


def test_a_failed_generation_leaves_the_session_as_it_was_and_idle(sessions: Sessions) -> None:
    session = sessions.open([], None)
    with pytest.raises(ZeroDivisionError), sessions.turn(session.session_id):
        raise ZeroDivisionError
    assert session.turns == []
    assert not session.busy


def test_a_second_generation_is_refused_while_one_runs(sessions: Sessions) -> None:
    session_id = sessions.open([], None).session_id
    with sessions.turn(session_id):
        with pytest.raises(SessionBusy, match=session_id), sessions.turn(session_id):
            pass
        assert sessions.get(session_id).busy
    with sessions.turn(session_id):
        pass


def test_expiry_counts_from_the_last_use(sessions: Sessions, clock: Clock) -> None:
    session = sessions.open([], None)
    assert session.expires_at == 1060
    clock.now = 1050
    with sessions.turn(session.session_id):
        clock.now = 1055
    assert session.expires_at == 1115
    clock.now = 1114.9
    assert sessions.get(session.session_id).expires_at == 1115, "reading is no use"
    assert len(sessions) == 1
    clock.now = 1115
    assert len(sessions) == 0
    with pytest.raises(SessionNotFound, match="session_id"):
        sessions.get(session.session_id)


def test_a_generating_session_does_not_expire(sessions: Sessions, clock: Clock) -> None:
    session = sessions.open([], ttl_seconds=1)
    with sessions.turn(session.session_id) as turn:
        clock.now = 5000
        assert sessions.get(session.session_id).busy
        assert len(sessions) == 1
        turn.commit([HELLO], "late")
    assert session.expires_at == 5001


def test_too_many_sessions_are_refused_until_one_expires(sessions: Sessions, clock: Clock) -> None:
    sessions.open([], ttl_seconds=10)
    for _ in range(2):
        sessions.open([], ttl_seconds=100)
    with pytest.raises(Overloaded, match="all 3 sessions") as caught:
        sessions.open([], None)
    assert caught.value.retry_after_seconds == 10
    clock.now += 10
    sessions.open([], None)


def test_a_closed_session_is_gone_and_a_generation_in_it_goes_on(sessions: Sessions) -> None:
    session_id = sessions.open([], None).session_id
    with sessions.turn(session_id) as turn:
        sessions.close(session_id)
        turn.commit([HELLO], "hi")
    with pytest.raises(SessionNotFound):
        sessions.close(session_id)


def test_outside_a_session_nothing_is_remembered(sessions: Sessions) -> None:
    with sessions.turn(None) as turn:
        assert turn.history == []
        turn.commit([HELLO], "hi")
    assert len(sessions) == 0


def test_a_lifetime_below_one_second_is_refused(sessions: Sessions) -> None:
    with pytest.raises(InvalidRequest, match="ttl_seconds"):
        sessions.open([], 0)


def test_ids_cannot_be_guessed_from_others(sessions: Sessions) -> None:
    ids = {sessions.open([], None).session_id for _ in range(3)}
    assert len(ids) == 3
    assert all(len(session_id) >= 20 for session_id in ids)


def test_a_long_id_is_not_echoed_whole(sessions: Sessions) -> None:
    with pytest.raises(SessionNotFound) as caught:
        sessions.get("x" * 100_000)
    assert len(str(caught.value)) < 200
