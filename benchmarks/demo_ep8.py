"""A mixture of experts over expert-parallel ranks beside the dense target it was made of, in one run on one machine.

    python -m benchmarks.demo_ep8 --config configs/demo-ep8.yaml --dense models/smollm2-135m-instruct

Serves the dense target first (the same config without ranks, plain decoding), then the mixture, off and with
speculation, over the same prompts at temperature 0. Prints tokens/s of both, whether every answer has the dense
target's ids, and how many tokens each rank's experts were sent. Exits 1 if an answer differs.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import urllib.request
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from tandem.bench.load import Plan, Step, run_plan
from tandem.bench.machine import machine_line
from tandem.bench.report import results_of, tables
from tandem.bench.stats import Pass
from tandem.cli.console import console
from tandem.cli.local_stack import local_stack
from tandem.client import AsyncClient, Message, SpeculationMode
from tandem.config import load_config
from tandem.prompts import KINDS, Prompt, Turn, mixed_prompts

QUESTION = "Why is the sky blue?"
EXPERT_TOKENS = "tandem_expert_tokens"


def dense_config(config: Path, dense: Path, folder: Path) -> Path:
    """The same stack with the dense target on one rank and without drafts."""
    data = yaml.safe_load(config.read_text())
    data["target"] = str(dense.resolve())
    data.pop("draft_model", None)
    data.pop("drafter", None)
    data["verifier"].pop("parallel", None)
    data["verifier"].pop("omp_spin_count", None)
    path = folder / "dense.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


async def serve_dense(config: Path, plan: Plan, prompts: list[Prompt]) -> list[Pass]:
    """Plain decoding's passes."""
    async with local_stack(config) as address, AsyncClient(address) as client:
        return await run_plan(client, replace(plan, modes=("off",)), prompts, partial(_show, "dense"))


async def serve_mixture(config: Path, plan: Plan, prompts: list[Prompt]) -> tuple[list[Pass], dict[int, float]]:
    """The passes of all modes, and the tokens that each rank's experts were sent; streams an answer first."""
    async with local_stack(config) as address, AsyncClient(address) as client:
        console.print(f"> {QUESTION}", style="bold", markup=False)
        async for chunk in client.generate([Message("user", QUESTION)], temperature=0, max_tokens=plan.max_tokens):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        console.print("\n")
        passes = await run_plan(client, plan, prompts, partial(_show, "mixture"))
        return passes, expert_loads(load_config(config).verifier.metrics_listen)


def expert_loads(metrics_listen: str | None) -> dict[int, float]:
    """Tokens sent to the experts of each rank, from the verifier's metrics; empty if it does not count them."""
    if metrics_listen is None:
        return {}
    with urllib.request.urlopen(f"http://{metrics_listen}/metrics", timeout=10) as response:
        text = response.read().decode()
    loads: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{EXPERT_TOKENS}_total" and "rank" in sample.labels:
                rank = int(sample.labels["rank"])
                loads[rank] = loads.get(rank, 0.0) + sample.value
    return loads


def differing(dense: list[Pass], mixture: list[Pass]) -> dict[str, list[str]]:
    """By mode the prompts whose answers have other ids than the dense target's."""
    expected = {r.index: r.token_ids for p in dense for r in p.requests}
    found: dict[str, list[str]] = {p.mode: [] for p in mixture}
    for p in mixture:
        found[p.mode] += [r.prompt_id for r in p.requests if r.token_ids != expected.get(r.index)]
    return found


async def compare(config: Path, dense: Path, plan: Plan) -> dict[str, Any]:
    """Everything, printed and returned."""
    prompts = [Prompt("demo", "chat", (Turn("user", QUESTION),)), *mixed_prompts(plan.prompts - 1)]
    with tempfile.TemporaryDirectory() as folder:
        dense_passes = await serve_dense(dense_config(config, dense, Path(folder)), plan, prompts)
    passes, loads = await serve_mixture(config, plan, prompts)
    (plain,), _ = results_of(dense_passes)
    results, costs = results_of(passes)
    ratios = {r.mode: r.tokens_per_second / plain.tokens_per_second for r in results}
    differ = differing(dense_passes, passes)
    parallel = load_config(config).verifier.parallel
    for table in tables(results, costs):
        console.print(table)
    console.print(f"dense target on one rank, plain: {plain.tokens_per_second:.2f} tokens/s")
    for result in results:
        same = "the dense target's ids in every answer"
        told = f"other ids than the dense target: {', '.join(sorted(set(differ[result.mode])))}"
        console.print(
            f"mixture on {parallel.ep} ranks, {result.mode}: {result.tokens_per_second:.2f} tokens/s, "
            f"{ratios[result.mode]:.3f} of the dense target's; {told if differ[result.mode] else same}",
            soft_wrap=True,
        )
    console.print(load_table(loads) if loads else f"expert loads: the verifier has no metric {EXPERT_TOKENS}_total")
    return {
        "dense": asdict(plain),
        "mixture": [asdict(result) for result in results],
        "ratio_to_dense": ratios,
        "differing": differ,
        "expert_tokens_of_ranks": loads,
        "parallel": parallel.model_dump(),
        "plan": asdict(plan),
        "machine_line": machine_line(),
    }


def load_table(loads: dict[int, float]) -> Table:
    """Tokens and share of each rank."""
    total = sum(loads.values()) or 1.0
    grid = Table(title="tokens sent to each rank's experts", title_justify="left")
    for name in ("rank", "tokens", "share", "of the mean"):
        grid.add_column(name, justify="right")
    for rank, tokens in sorted(loads.items()):
        grid.add_row(str(rank), f"{tokens:,.0f}", f"{tokens / total:.1%}", f"{tokens / total * len(loads):.2f}")
    return grid


def _show(what: str, step: Step) -> None:
    print(f"{what}: {step.mode}, {f'run {step.run}' if step.run else 'warm-up'}", flush=True)


def _modes(text: str) -> tuple[SpeculationMode, ...]:
    return cast(tuple[SpeculationMode, ...], tuple(text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo-ep8.yaml"))
    parser.add_argument("--dense", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--modes", type=_modes, default=_modes("off,block,auto"))
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plan = Plan(options.modes, (1,), options.prompts, options.max_tokens, 0.0, options.runs, KINDS)
    measured = asyncio.run(compare(options.config, options.dense, plan))
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    if any(measured["differing"].values()):
        sys.exit("answers differ from the dense target's")


if __name__ == "__main__":
    main()
