"""The page as a browser shows it, and what there is to compare it with."""

import json
import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from selenium.webdriver import Chrome

# Not by a proxy: the stack is near.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Page:
    """One open page, and the HTTP ports of the stack behind it."""

    driver: Chrome
    gateway: str
    verifier: str
    """Of its metrics."""

    def open(self) -> None:
        self.driver.get(f"http://{self.gateway}/dashboard")

    def text(self, element_id: str) -> str:
        return str(self.driver.execute_script("return document.getElementById(arguments[0]).textContent", element_id))

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
        return list(self.driver.execute_script(script, selector))

    def health(self, service: str) -> tuple[str, str]:
        """(state, what it says)"""
        script = (
            "const e = document.getElementById(arguments[0]); return [e.dataset.state, e.lastElementChild.textContent]"
        )
        state, text = self.driver.execute_script(script, f"health-{service}")
        return state, text

    def number(self, element_id: str) -> float:
        """Of a figure, which must be one."""
        text = self.text(element_id)
        match = re.fullmatch(r"([\d,]+(?:\.\d+)?)(?: %)?", text)
        assert match, f"{element_id}: {text!r}"
        return float(match[1].replace(",", ""))

    def nodes(self, kind: str) -> list[str]:
        """Indices of the tree's nodes of this class, as they are drawn."""
        script = "return [...document.querySelectorAll(arguments[0])].map((element) => element.dataset.index)"
        return list(self.driver.execute_script(script, f"#tree g.{kind}"))

    def state(self) -> dict[str, Any]:
        """What the page is told."""
        return dict(json.loads(_read(f"http://{self.gateway}/dashboard/state.json")))

    def metrics(self) -> dict[str, float]:
        """The verifier's, by name with labels."""
        samples = (
            line.rpartition(" ") for line in _read(f"http://{self.verifier}/metrics").splitlines() if line[:1] != "#"
        )
        return {name: float(value) for name, _, value in samples}

    def errors(self) -> list[str]:
        """Of the console, since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, what
            time.sleep(0.2)


def _read(url: str) -> str:
    with _OPENER.open(url, timeout=10) as reply:
        return str(reply.read().decode())
