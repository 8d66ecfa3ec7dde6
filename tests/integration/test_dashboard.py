"""What the dashboard's page is told over HTTP: figures as they are, no NaN, text as data, content only where asked."""

import asyncio
import json
import math
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from http.client import HTTPResponse
from typing import Any

import pytest
import pytest_asyncio

from gateway.dashboard import pages
from tandem.v1 import generation_pb2
from tandem.v1.verification_pb2 import GetLoadResponse, GraphBucket, SpeculationState, VerifiedDraft
from tests.fakes import tokenizers
from tests.fakes.fake_verifier import FakeVerifier
from tests.fakes.gateway_stack import GatewayStack, gateway_stack
from tests.fakes.ports import free_port

SECTIONS = {"clock", "version", "gateway", "verifier", "drafters", "load", "steps", "speculation", "draft"}
SCRIPT = "<script>alert('x')</script>"


class Page:
    """The gateway's HTTP port."""

    def __init__(self, stack: GatewayStack, port: int):
        self.stack = stack
        self._port = port

    async def get(self, path: str, method: str = "GET") -> HTTPResponse:
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", method=method)
        return await asyncio.to_thread(urllib.request.urlopen, request, timeout=10)

    async def state(self) -> dict[str, Any]:
        """Read anew."""
        await asyncio.sleep(pages.FRESH_SECONDS)
        reply = await self.get("/dashboard/state.json")
        return json.loads(reply.read())


@pytest_asyncio.fixture
async def page(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Page]:
    monkeypatch.setattr(pages, "FRESH_SECONDS", 0.0)
    port = free_port()
    async with gateway_stack(metrics_listen=f"127.0.0.1:{port}") as stack:
        yield Page(stack, port)


async def until_shown(page: Page, shows: bool) -> dict[str, Any]:
    """The gateway hears what does not change of the verifier once per poll."""
    page.stack.verifier.shows_last_draft = shows
    async with asyncio.timeout(5):
        while (state := await page.state())["draft"]["shown"] is not shows:
            pass
    return state


def draft() -> VerifiedDraft:
    letters = [tokenizers.byte_level().token_to_id(x) for x in "abc"]
    return VerifiedDraft(
        number=7,
        anchor=letters[0],
        tokens=[letters[1], letters[2], 1],
        parents=[0, 1, 0],
        log_probs=[math.log(0.5), math.log(0.25), float("-inf")],
        accepted_nodes=[1, 2],
        bonus=letters[0],
        age_ms=1500,
    )


async def test_the_page_and_its_files(page: Page) -> None:
    """All that the page needs is there, none of it from elsewhere, and the browser is told to take nothing else."""
    reply = await page.get("/dashboard")
    text = reply.read().decode()
    assert reply.url.endswith("/dashboard/")
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for name in ("dashboard.css", "dashboard.js", "draw.js", "history.js", "tree.js", "icon.svg"):
        file = await page.get(f"/dashboard/{name}")
        body = file.read().decode()
        text += body.replace("http://www.w3.org/2000/svg", "")
        assert file.headers["X-Content-Type-Options"] == "nosniff"
    for word in ("http://", "https://", "//cdn", "innerHTML", "insertAdjacentHTML", " style=", "onclick="):
        assert word not in text


@pytest.mark.parametrize(
    ("path", "method", "code"),
    [
        ("/dashboard/none.js", "GET", 404),
        ("/dashboard/../state.py", "GET", 404),
        ("/dashboard/__init__.py", "GET", 404),
        ("/dashboard/state.json", "POST", 405),
    ],
)
async def test_nothing_else_is_served(page: Page, path: str, method: str, code: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        await page.get(path, method)
    assert caught.value.code == code


async def test_metrics_are_where_they_were(page: Page) -> None:
    assert b"tandem_gateway_verifier_ready 1.0" in (await page.get("/metrics")).read()


async def test_figures_are_the_verifiers(page: Page) -> None:
    page.stack.verifier.load = GetLoadResponse(
        running_sequences=3,
        waiting_sequences=2,
        kv_blocks_used=40,
        kv_blocks_cached=60,
        kv_blocks_total=1024,
        drafters=2,
        drafter_names=["a", "b"],
        emitted_tokens=700,
        drafts=200,
        drafted_tokens=1400,
        accepted_tokens=140,
        accepted_per_position=[100, 30, 10],
        median_plain_step=generation_pb2.StepTiming(verify_us=17, host_us=2, rows=4),
        speculation=SpeculationState(
            mode=generation_pb2.SPECULATION_MODE_TREE, asked_nodes=6, reason="pays", gain=1.25, step_us=21_000
        ),
        graph_buckets=[GraphBucket(rows=8, captured=True), GraphBucket(rows=4, reason="memory")],
    )
    state = await page.state()
    assert state.keys() == SECTIONS
    load = state["load"]
    assert (load["running"], load["waiting"], load["emitted_tokens"]) == (3, 2, 700)
    assert (load["kv_used"], load["kv_cached"], load["kv_total"]) == (40, 60, 1024)
    assert (load["drafts"], load["drafted_tokens"], load["accepted_tokens"]) == (200, 1400, 140)
    assert load["accepted_per_position"] == [100, 30, 10]
    assert (load["graph_buckets"], load["graph_buckets_captured"]) == (2, 1)
    assert state["drafters"] == {"expected": True, "names": ["a", "b"]}
    assert state["steps"]["drafted"] is None
    assert state["steps"]["plain"]["verify_us"] == 17
    speculation = state["speculation"]
    assert (speculation["mode"], speculation["nodes"], speculation["reason"]) == ("tree", 6, "pays")
    assert (speculation["gain"], speculation["step_us"]) == (1.25, 21_000)
    assert state["verifier"]["model"] == "fake"


async def test_a_gain_that_is_not_known_is_null(page: Page) -> None:
    """JSON has no infinity, and the page no use for one."""
    page.stack.verifier.load = GetLoadResponse(speculation=SpeculationState(gain=math.inf))
    assert (await page.state())["speculation"]["gain"] is None


async def test_content_only_where_the_verifier_is_told_to_show_it(page: Page) -> None:
    """Off, the page can say so, and there is nothing of a request in what it is told."""
    state = await until_shown(page, False)
    assert state["draft"] == {"shown": False, "last": None}
    page.stack.verifier.load = GetLoadResponse(last_draft=draft())
    state = await until_shown(page, True)
    last = state["draft"]["last"]
    assert [node["text"] for node in last["nodes"]] == ["a", "b", "c", tokenizers.SPECIAL[1]]
    assert [node["parent"] for node in last["nodes"]] == [None, 0, 1, 0]
    assert [node["accepted"] for node in last["nodes"]] == [True, True, True, False]
    assert [node["probability"] for node in last["nodes"]] == pytest.approx([1.0, 0.5, 0.25, 0.0])
    assert (last["bonus"], last["number"], last["age_seconds"]) == ("a", 7, 1.5)


async def test_tokens_are_data_whatever_they_spell(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come as strings of JSON, which no browser reads as a page; the page itself only writes text."""
    monkeypatch.setattr("gateway.tokenizer.TargetTokenizer.shown_text", lambda *_: SCRIPT)
    page.stack.verifier.load = GetLoadResponse(last_draft=draft())
    state = await until_shown(page, True)
    assert state["draft"]["last"]["nodes"][0]["text"] == SCRIPT
    reply = await page.get("/dashboard/state.json")
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"


async def test_an_unreachable_verifier_is_told_of(page: Page) -> None:
    """Without figures: old ones would look live."""
    await page.stack.verifier.stop()
    async with asyncio.timeout(10):
        while (state := await page.state())["verifier"]["ready"]:
            pass
    assert state.keys() == SECTIONS
    assert [state[key] for key in ("drafters", "load", "steps", "speculation", "draft")] == [None] * 5
    assert state["verifier"]["trouble"]
    assert state["verifier"]["model"] == "fake"


async def test_many_pages_ask_the_verifier_once(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FRESH_SECONDS", 60.0)
    asked = 0

    async def count(self: FakeVerifier, request: Any, context: Any) -> GetLoadResponse:
        nonlocal asked
        asked += 1
        return self.load

    monkeypatch.setattr(FakeVerifier, "GetLoad", count)
    replies = await asyncio.gather(*(page.get("/dashboard/state.json") for _ in range(10)))
    assert len({reply.read() for reply in replies}) == 1
    assert asked <= 1
