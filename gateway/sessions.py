"""Conversations whose history the gateway keeps, in memory.

A generation in a session adds its turns and the assistant's answer together, when it ends normally or when the client
cancels it (or its deadline passes) after some text was streamed; the answer is the text that was streamed. A generation
that fails, or that is cancelled before any text, leaves the session as it was.

A session expires `ttl_seconds` after it was opened or last used by a generation (from the generation's end on).
Reading it is no use. A session that generates does not expire.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gateway.chat_template import Turn
from tandem.errors import Overloaded, invalid


class SessionNotFound(LookupError):
    """No such session: never opened, closed or expired."""


class SessionBusy(RuntimeError):
    """The session is generating."""


@dataclass
class Session:
    """A conversation."""

    session_id: str
    turns: list[Turn]
    ttl_seconds: float
    expires_at: float
    """Unix seconds."""
    busy: bool = False


class SessionTurn:
    """One generation in a session, or outside any: what came before it, and how it adds to the history."""

    def __init__(self, session: Session | None):
        self._session = session

    @property
    def history(self) -> list[Turn]:
        return self._session.turns if self._session else []

    def commit(self, turns: Sequence[Turn], answer: str) -> None:
        """Add the request's turns and the assistant's answer."""
        if self._session:
            self._session.turns = [*self._session.turns, *turns, Turn("assistant", answer)]


class Sessions:
    """All sessions. For one event loop."""

    def __init__(self, max_sessions: int, default_ttl_seconds: int, clock: Callable[[], float] = time.time):
        self._max_sessions = max_sessions
        self._default_ttl_seconds = default_ttl_seconds
        self._clock = clock
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        """Sessions that have not expired."""
        now = self._clock()
        return sum(session.busy or session.expires_at > now for session in list(self._sessions.values()))

    def open(self, turns: Sequence[Turn], ttl_seconds: int | None) -> Session:
        """Open a session; Overloaded if there are too many."""
        if ttl_seconds is not None and ttl_seconds < 1:
            raise invalid("ttl_seconds", f"must be at least 1, is {ttl_seconds}")
        self._drop_expired()
        now = self._clock()
        if len(self._sessions) >= self._max_sessions:
            next_expiry = min(session.expires_at for session in self._sessions.values())
            raise Overloaded(
                f"all {self._max_sessions} sessions are in use; close one, or wait until one expires",
                min(max(next_expiry - now, 1.0), 60.0),
            )
        ttl = self._default_ttl_seconds if ttl_seconds is None else ttl_seconds
        session = Session(secrets.token_urlsafe(16), list(turns), ttl, now + ttl)
        self._sessions[session.session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """A session; SessionNotFound if there is none by that id."""
        self._drop_expired()
        session = self._sessions.get(session_id)
        if session is None:
            shown = repr(session_id if len(session_id) <= 64 else session_id[:64] + "...")
            raise SessionNotFound(f"session_id: there is no session {shown}: never opened, closed or expired")
        return session

    def close(self, session_id: str) -> None:
        """Forget a session. A generation that runs in it goes on; its answer is not kept."""
        del self._sessions[self.get(session_id).session_id]

    @contextlib.contextmanager
    def turn(self, session_id: str | None) -> Iterator[SessionTurn]:
        """Inside, the session generates; SessionBusy if it does already. Without a session nothing is remembered."""
        if session_id is None:
            yield SessionTurn(None)
            return
        session = self.get(session_id)
        if session.busy:
            raise SessionBusy(f"session_id: session {session_id!r} is busy with another generation")
        session.busy = True
        try:
            yield SessionTurn(session)
        finally:
            session.busy = False
            session.expires_at = self._clock() + session.ttl_seconds

    def _drop_expired(self) -> None:
        now = self._clock()
        expired = [s.session_id for s in self._sessions.values() if not s.busy and s.expires_at <= now]
        for session_id in expired:
            del self._sessions[session_id]
