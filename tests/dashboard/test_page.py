"""The dashboard in a real browser over the real demo stack: before, during and after a load, without its drafter."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tandem.client import AsyncClient, Message
from tandem.prompts import mixed_prompts
from tandem.v1.verification_pb2 import GetLoadResponse
from tests.dashboard.browser import chromium, screenshot
from tests.dashboard.page import Page
from tests.fakes.fake_verifier import FakeVerifier
from tests.fakes.gateway_stack import gateway_stack
from tests.fakes.ports import free_ports
from tests.observe.load import load, running_stack

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "dashboard.png"
FIGURES = ("throughput", "length", "rate", "length-total", "rate-total")
LOAD_SECONDS = 15.0


@dataclass(frozen=True)
class Story:
    """A page that was open before the first request, and the stack that it shows."""

    page: Page
    client: AsyncClient
    folder: Path
    """Of the stack's config."""

    async def until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """The stack is served meanwhile."""
        await asyncio.to_thread(self.page.until, condition, seconds, what)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def story(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Story]:
    """The tests below tell it, in order."""
    folder, ports = tmp_path_factory.mktemp("dashboard"), free_ports(6)
    async with running_stack(folder, ports) as client:
        with chromium(1280, 600) as driver:
            page = Page(driver, f"127.0.0.1:{ports[3]}", f"127.0.0.1:{ports[4]}")
            await asyncio.to_thread(page.open)
            yield Story(page, client, folder)


@pytest.fixture
def page(story: Story) -> Page:
    return story.page


async def break_off_at_a_good_tree(story: Story) -> None:
    """Generations that end when several tokens came at once, until the last draft has two accepted nodes: what the end
    of a whole generation verifies has a few nodes only."""
    for prompt in mixed_prompts(12):
        messages = [Message(turn.role, turn.content) for turn in prompt.messages]
        generation = story.client.generate(
            messages, speculation_mode="tree", max_draft_nodes=16, max_tokens=120, temperature=0
        )
        async for chunk in generation:
            if len(chunk.token_ids) >= 3:
                generation.cancel()
        await asyncio.sleep(0.7)
        last = (await asyncio.to_thread(story.page.state))["draft"]["last"]
        if sum(node["accepted"] for node in last["nodes"][1:]) >= 2:
            return
    raise AssertionError("no draft had two accepted nodes")


async def test_before_the_first_request(story: Story, page: Page) -> None:
    """All parts are well, and there is no traffic."""
    await story.until(lambda: page.health("verifier")[0] == "good", 20, "the verifier is not shown as serving")
    assert page.health("gateway") == ("good", "serving")
    assert page.health("drafter") == ("good", "connected")
    assert [page.text(figure) for figure in FIGURES] == ["no traffic"] * len(FIGURES)
    assert page.text("tree-text") == page.text("positions-note") == "no traffic"
    assert "NaN" not in page.text("tree-text") + "".join(page.texts("body"))


async def test_under_load(story: Story, page: Page) -> None:
    """Live figures; the picture in the documentation is taken here."""
    loading = asyncio.create_task(load(story.client, LOAD_SECONDS))
    await asyncio.sleep(LOAD_SECONDS)
    await loading
    await break_off_at_a_good_tree(story)
    FIGURE.parent.mkdir(exist_ok=True)
    await asyncio.sleep(1.5)
    await asyncio.to_thread(screenshot, page.driver, FIGURE)
    assert page.number("throughput") > 0
    assert page.number("length") > 1
    assert page.text("choice").startswith(("Trees of", "Plain"))
    assert "NaN" not in "".join(page.texts("body"))


async def test_figures_are_the_metrics(story: Story, page: Page) -> None:
    """When nothing runs, what the page says of the time since start is what Prometheus would scrape."""
    await story.until(lambda: page.text("running") == "0", 20, "sequences run on")
    await story.until(lambda: page.text("throughput") == "no traffic", 20, "throughput without traffic")
    metrics = page.metrics()
    drafts, drafted = (metrics[f"tandem_spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens"))
    accepted = metrics["tandem_spec_decode_num_accepted_tokens_total"]
    assert page.number("emitted") == metrics["tandem_generation_tokens_total"] > 0
    assert page.number("length-total") == pytest.approx(1 + accepted / drafts, abs=0.0051)
    assert page.number("rate-total") == pytest.approx(100 * accepted / drafted, abs=0.051)
    # All traffic there ever was lies within the page's last minute, or the page shows all since start.
    per_position = "tandem_spec_decode_num_accepted_tokens_per_pos_total"
    shares = [float(text.removesuffix(" %")) for text in page.texts("#positions li > :last-child")]
    expected = [100 * metrics[f'{per_position}{{position="{k}"}}'] / drafts for k in range(len(shares))]
    assert page.state()["load"]["drafts"] == drafts
    if f"{drafts:,.0f} drafts" in page.text("positions-note"):
        assert shares == pytest.approx(expected, abs=0.051)
    used, cached = (metrics[f"tandem_kv_blocks_{name}"] for name in ("used", "cached"))
    assert page.text("kv-text").startswith(f"{used:.0f} blocks used, {cached:.0f} cached")


async def test_the_tree_is_the_one_verified_last(page: Page) -> None:
    """Every node is drawn, those accepted are lit, and they are a path from the anchor."""
    last = page.state()["draft"]["last"]
    nodes = last["nodes"]
    accepted = [i for i, node in enumerate(nodes) if node["accepted"] and i]
    assert len(accepted) >= 2
    assert sorted(page.nodes("accepted"), key=int) == [str(i) for i in accepted]
    assert len(page.nodes("rejected")) == len(nodes) - 1 - len(accepted)
    assert page.nodes("bonus") == ["bonus"]
    assert [nodes[i]["parent"] for i in accepted] == [0, *accepted][: len(accepted)]
    assert page.text("tree-text").startswith(f"{len(accepted)} of {len(nodes) - 1} accepted")
    lit = "return getComputedStyle(document.querySelector(arguments[0])).fill"
    fills = [page.driver.execute_script(lit, f"#tree g.{kind} rect") for kind in ("accepted", "rejected")]
    assert fills[0] != fills[1]


async def test_tokens_never_become_markup(page: Page) -> None:
    """Whatever a token spells is shown as text."""
    hostile = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
    script = """
        const [hostile, done] = arguments;
        import("./tree.js").then(({ drawTree }) => {
          const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
          document.body.append(svg);
          const node = { text: hostile, parent: 0, probability: 0.5, accepted: true };
          drawTree(svg, { nodes: [{ ...node, parent: null }, node], bonus: hostile });
          const names = new Set([...svg.querySelectorAll("*")].map((element) => element.localName));
          const title = svg.querySelector("title").textContent;
          svg.remove();
          done([[...names].sort(), title, window.hacked ?? null]);
        });
    """
    names, title, hacked = page.driver.execute_async_script(script, hostile)
    assert names == ["g", "path", "rect", "text", "title", "tspan"]
    assert "<img" in title
    assert hacked is None


async def test_keyboard_and_names(page: Page) -> None:
    """What can be worked is reached and worked by keyboard; what is a picture has a name."""
    active = page.driver.switch_to
    page.driver.execute_script("document.getElementById('hold').focus()")
    active.active_element.send_keys(" ")
    assert active.active_element.get_attribute("aria-pressed") == "true"
    active.active_element.send_keys(" ")
    assert active.active_element.get_attribute("aria-pressed") == "false"
    unnamed = """
        const text = (id) => document.getElementById(id)?.textContent;
        const name = (e) => e.getAttribute("aria-label") || text(e.getAttribute("aria-labelledby"));
        const all = [...document.querySelectorAll("[role=img], [role=region], section, ul")];
        return all.filter((e) => !name(e)).map((e) => e.outerHTML);
    """
    assert page.driver.execute_script(unnamed) == []


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False)])
async def test_fits_other_screens(page: Page, width: int, dark: bool) -> None:
    """A phone's width needs no scrolling sideways, and the dark page is dark."""
    with chromium(width, 800, dark) as driver:
        other = Page(driver, page.gateway, page.verifier)
        await asyncio.to_thread(other.open)
        await asyncio.to_thread(
            other.until, lambda: other.health("verifier")[0] == "good", 20, "the page hears nothing"
        )
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        colour = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (colour == "rgb(12, 17, 22)") == dark
        assert other.errors() == []


async def test_a_draft_is_shown_only_where_configured() -> None:
    """Else the page says what to set."""
    port = free_ports(1)[0]
    verifier = FakeVerifier(load=GetLoadResponse(drafts=5, drafter_names=["one", "two"], kv_blocks_total=8))
    async with gateway_stack(verifier, metrics_listen=f"127.0.0.1:{port}"):
        with chromium(1280, 600) as driver:
            page = Page(driver, f"127.0.0.1:{port}", "")
            await asyncio.to_thread(page.open)
            told = "not shown: set verifier.show_last_draft"
            await asyncio.to_thread(page.until, lambda: page.text("tree-text") == told, 20, "not said")
            assert page.health("drafter") == ("good", "2 connected")
            assert not driver.find_element("id", "tree-scroll").is_displayed()
            assert page.errors() == []


async def test_a_drafter_that_dies_is_shown(story: Story, page: Page) -> None:
    """And that it is back."""
    os.kill(_pid_of("drafter_service", story.folder), signal.SIGKILL)
    await story.until(lambda: page.health("drafter") == ("bad", "none connected, decoding plainly"), 10, "not shown")
    assert page.text("announcement") == "drafter: none connected, decoding plainly"
    await story.until(lambda: page.health("drafter") == ("good", "connected"), 60, "not shown as back")


async def test_no_errors_in_the_console(page: Page) -> None:
    """Of the whole story."""
    assert page.errors() == []


async def test_a_gateway_that_dies_is_shown(story: Story, page: Page) -> None:
    """The last of the story: old figures do not look live."""
    os.kill(_pid_of("gateway", story.folder), signal.SIGKILL)
    await story.until(lambda: page.health("gateway") == ("bad", "does not answer"), 15, "not shown")
    assert page.driver.execute_script("return document.body.hasAttribute('data-stale')")
    assert page.text("fresh").startswith("not heard for")


def _pid_of(module: str, folder: Path) -> int:
    """Of the stack's process that runs a module."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if module.encode() in words and str(folder / "stack.yaml").encode() in words:
            return int(entry.parent.name)
    raise AssertionError(f"no process runs {module}")
