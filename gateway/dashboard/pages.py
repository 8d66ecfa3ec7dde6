"""The page over HTTP: static files and state.json, below /dashboard/. A WSGI application."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

logger = logging.getLogger(__name__)

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = [
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]

FRESH_SECONDS = 0.5
"""So long one answer serves all who ask: many open pages ask the verifier no more than a few do."""
_PATIENCE_SECONDS = 5.0


class DashboardPages:
    """Called by the HTTP server's threads."""

    def __init__(self, read_state: Callable[[], Awaitable[dict[str, Any]]], loop: asyncio.AbstractEventLoop):
        """read_state: run in this event loop."""
        self._read_state = read_state
        self._loop = loop
        self._lock = threading.Lock()
        self._state, self._read_at = b"", -FRESH_SECONDS
        folder = resources.files("gateway.dashboard") / "static"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if _type_of(file.name)}

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        status, headers, body = self._answer(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        start_response(status, [*headers, *_HEADERS, ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, method: str, path: str) -> tuple[str, list[tuple[str, str]], bytes]:
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", [("Allow", "GET, HEAD")], b""
        if path == "/dashboard":
            # Links on the page are relative.
            return "308 Permanent Redirect", [("Location", "dashboard/")], b""
        name = path.removeprefix("/dashboard/") or "index.html"
        if name == "state.json":
            try:
                return "200 OK", [("Content-Type", "application/json")], self._fresh_state()
            except (RuntimeError, TimeoutError) as error:
                logger.warning("the dashboard's figures cannot be read: %r", error)
                return "503 Service Unavailable", [], b""
        if name in self._files:
            return "200 OK", [("Content-Type", _type_of(name))], self._files[name]
        return "404 Not Found", [("Content-Type", "text/plain")], b"no such page\n"

    def _fresh_state(self) -> bytes:
        """RuntimeError when the gateway ends, TimeoutError if it is stuck."""
        with self._lock:
            if time.monotonic() - self._read_at >= FRESH_SECONDS:
                reading = asyncio.run_coroutine_threadsafe(_await(self._read_state()), self._loop)
                self._state = json.dumps(reading.result(_PATIENCE_SECONDS), allow_nan=False).encode()
                self._read_at = time.monotonic()
            return self._state


async def _await(reading: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await reading


def _type_of(name: str) -> str:
    return _TYPES.get(name.rpartition(".")[2], "")
