"""A real Prometheus scrapes the real demo stack by the shipped config, and is asked all that is shipped to be asked."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from tests.fakes.ports import free_ports
from tests.observe.elsewhere import Elsewhere, exported
from tests.observe.load import SERVICES, load, running_stack
from tests.observe.prometheus import Prometheus, running_prometheus
from tests.observe.shipped import Expression, alert_selectors, panels, recorded, write_config

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

LOAD_SECONDS = 30.0
WINDOW_SECONDS = 25
"""Of rates. Half a minute after the load they know of none."""
DEMO, ELSEWHERE = "demo", "elsewhere"

EXPRESSIONS = [*panels(), *recorded(), *alert_selectors()]

NOT_HERE = {
    "tandem-verifier: Imbalance": "the demo target has no experts",
    "tandem-verifier: Experts touched": "the demo target has no experts",
    "tandem-verifier: Busiest rank over mean": "the demo target has no experts",
    "tandem-verifier: Replays by rows": "a CPU captures no graphs",
    "tandem-verifier: Time of a replay by rows": "a CPU captures no graphs",
    "tandem-speculation: Graphs of the drafters A": "a CPU captures no graphs",
}
"""What the demo stack cannot have, by how `where` begins, and why: an exporter of the real classes has it."""


@dataclass
class Seen:
    """What Prometheus answered, by expression: values, at three moments."""

    prometheus: Prometheus
    fresh: dict[str, list[float]] = field(default_factory=dict)
    """Before the first request."""
    loaded: dict[str, list[float]] = field(default_factory=dict)
    idle: dict[str, list[float]] = field(default_factory=dict)
    """After the load, when rates have forgotten it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Seen]:
    """The whole story, told once."""
    folder = tmp_path_factory.mktemp("observe")
    *ports, own, others = free_ports(8)
    targets = {(DEMO, service): port for service, port in zip(SERVICES, ports[3:], strict=True)}
    config = write_config(folder, {**targets, (ELSEWHERE, "verifier"): others}, "1s")
    with exported(others) as elsewhere:
        async with running_stack(folder, ports) as client, running_prometheus(config, own) as prometheus:
            seen = Seen(prometheus)
            await asyncio.sleep(5)
            seen.fresh = await _ask(prometheus, DEMO)
            stepping = asyncio.create_task(_step(elsewhere))
            await load(client, LOAD_SECONDS)
            await asyncio.sleep(2)
            seen.loaded = await _ask(prometheus, DEMO) | await _ask(prometheus, ELSEWHERE, NOT_HERE)
            stepping.cancel()
            await asyncio.sleep(WINDOW_SECONDS + 5)
            seen.idle = await _ask(prometheus, DEMO)
            yield seen


async def _step(elsewhere: Elsewhere) -> None:
    while True:
        elsewhere.step()
        await asyncio.sleep(0.2)


async def _ask(prometheus: Prometheus, namespace: str, only: object = None) -> dict[str, list[float]]:
    """The values of all expressions, or of those that are not here."""
    asked = [e for e in EXPRESSIONS if only is None or _why_not_here(e)]

    def ask() -> dict[str, list[float]]:
        return {e.where: prometheus.values(e.asked(namespace, f"{WINDOW_SECONDS}s")) for e in asked}

    return await asyncio.to_thread(ask)


def _why_not_here(expression: Expression) -> str:
    return next((why for where, why in NOT_HERE.items() if expression.where.startswith(where)), "")


async def test_all_is_scraped(seen: Seen) -> None:
    """Three services of the demo, and the other exporter: found and named by the shipped relabelling."""
    assert seen.prometheus.unhealthy_targets() == []
    assert len(seen.prometheus.values(f'up{{namespace="{DEMO}", job=~"gateway|verifier|drafter"}} == 1')) == 3


async def test_all_rules_are_evaluated(seen: Seen) -> None:
    assert seen.prometheus.unhealthy_rules() == []


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda e: e.where)
async def test_expression_has_data_under_load(seen: Seen, expression: Expression) -> None:
    """Numbers, all of them."""
    values = seen.loaded[expression.where]
    assert values
    assert all(map(math.isfinite, values))


@pytest.mark.parametrize("moment", ["fresh", "idle"])
async def test_idle_system_shows_no_nan(seen: Seen, moment: str) -> None:
    """Before the first request and after the last one, panels have numbers or nothing, which reads "no traffic"."""
    answers: dict[str, list[float]] = getattr(seen, moment)
    assert {where: values for where, values in answers.items() if not all(map(math.isfinite, values))} == {}


async def test_idle_system_shows_no_ratio(seen: Seen) -> None:
    """A ratio that has a value without traffic would be made up."""
    ratios = [e.where for e in panels() if "> 0)" in e.promql and "kv_blocks" not in e.promql]
    assert ratios
    assert {where: seen.idle[where] for where in ratios if seen.idle[where]} == {}


async def test_what_is_not_here_is_not_here(seen: Seen) -> None:
    """Else the list would hide what should be asked of the demo stack."""
    assert [e.where for e in EXPRESSIONS if _why_not_here(e) and seen.fresh[e.where]] == []
