"""A Prometheus of the machine's, for the time of a block."""

import asyncio
import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 30.0


@dataclass(frozen=True)
class Prometheus:
    """Its HTTP API."""

    address: str

    def values(self, query: str) -> list[float]:
        """Of an instant query, which must be one that Prometheus takes."""
        data = self._get("query", query=query)
        assert data["resultType"] == "vector", query
        return [float(sample["value"][1]) for sample in data["result"]]

    def unhealthy_targets(self) -> list[str]:
        """Scrapes that failed, with why; what was not scraped yet counts."""
        targets = self._get("targets")["activeTargets"]
        assert targets
        return [f"{t['scrapeUrl']}: {t['health']}: {t['lastError']}" for t in targets if t["health"] != "up"]

    def unhealthy_rules(self) -> list[str]:
        """Rules that could not be evaluated, with why; what was not evaluated yet counts."""
        rules = [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
        assert rules
        return [f"{r['name']}: {r['health']}: {r.get('lastError')}" for r in rules if r["health"] != "ok"]

    def is_ready(self) -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return bool(urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5).status == 200)
        return False

    def _get(self, what: str, **arguments: str) -> Any:
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from None


@contextlib.asynccontextmanager
async def running_prometheus(config: Path, port: int) -> AsyncIterator[Prometheus]:
    """One that scrapes and evaluates by this config; its data lies beside it."""
    prometheus = Prometheus(f"127.0.0.1:{port}")
    log = config.parent / "prometheus.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={config.parent / 'data'}",
            f"--web.listen-address={prometheus.address}",
            "--log.level=warn",
            stdout=output,
            stderr=output,
        )
    try:
        async with asyncio.timeout(START_SECONDS):
            while not await asyncio.to_thread(prometheus.is_ready):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.2)
        yield prometheus
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
