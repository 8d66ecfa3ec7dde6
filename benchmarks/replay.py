"""What speculation is worth at a given acceptance length and load: off and auto alternately, with a replay drafter in
the place of the stack's own (benchmarks/replay_drafter.py, which explains what its figures mean and what not).

    python -m benchmarks.replay --config configs/demo.yaml --acceptance-lengths 1.0,1.5,2,3,3.8,5,6 \\
        --concurrency 1,2,4,8,16,32 --json replay.json

First the target's answers are recorded through the gateway with speculation off. An acceptance length holds for blocks
of the configured drafter's length; where the verifier verifies less of a draft, fewer tokens are accepted.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.replay_drafter import Recorded, acceptance_probability, save_recording
from tandem.bench.load import Plan, Step, run_plan
from tandem.bench.machine import machine, machine_line, versions
from tandem.bench.report import results_of
from tandem.checkpoints.draft_config import DraftConfig
from tandem.cli.console import console
from tandem.cli.local_stack import quiet_stack
from tandem.cli.parts import Part, check_ports_free, parts_of
from tandem.client import AsyncClient, Message
from tandem.config import StackConfig, load_config
from tandem.prompts import KINDS, Prompt, mixed_prompts

RECORDING_CLIENTS = 4


def block_nodes(config: StackConfig) -> int:
    """Nodes of a block of the configured drafter."""
    model = config.draft_model
    return (DraftConfig.load(model).block_size if model else config.drafter.ngram_block_size) - 1


def replay_part(drafter: Part, config: Path, recording: Path, nodes: int, acceptance_length: float) -> Part:
    """A replay drafter in the place of `drafter`."""
    options = ("--config", config, "--recording", recording, "--nodes", nodes, "--acceptance-length", acceptance_length)
    command = (sys.executable, "-m", "benchmarks.replay_drafter", *map(str, options))
    return replace(drafter, command=command, essential=True)


async def record(client: AsyncClient, prompts: list[Prompt], max_tokens: int) -> list[Recorded]:
    """The target's greedy answers without drafts."""
    slots = asyncio.Semaphore(RECORDING_CLIENTS)

    async def one(prompt: Prompt) -> Recorded:
        messages = [Message(turn.role, turn.content) for turn in prompt.messages]
        async with slots:
            generation = client.generate(messages, temperature=0, max_tokens=max_tokens, speculation_mode="off")
            await generation.result()
        return Recorded(await client.tokenize(messages), generation.token_ids)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def measure(config_path: Path, acceptance_lengths: list[float], plan: Plan, into: Path | None) -> dict[str, Any]:
    """The whole table; written to `into` after every acceptance length."""
    config = load_config(config_path)
    nodes = block_nodes(config)
    for length in acceptance_lengths:
        acceptance_probability(length, nodes)  # a length that cannot be is told now
    check_ports_free(config)
    parts = {part.name: part for part in parts_of(config, config_path)}
    drafter = parts.pop("drafter")
    prompts = mixed_prompts(max(plan.prompts, *plan.concurrency), plan.kinds)
    address = parts["gateway"].address
    measured: dict[str, Any] = {
        "replay": [],
        "nodes": nodes,
        "plan": asdict(plan),
        "machine": machine(),
        "machine_line": machine_line(),
        "versions": versions(),
    }
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "answers.json"
        async with quiet_stack(list(parts.values())), AsyncClient(address) as client:
            save_recording(recording, await record(client, list(dict.fromkeys(prompts)), plan.max_tokens))
            for length in acceptance_lengths:
                part = replay_part(drafter, config_path, recording, nodes, length)
                async with quiet_stack([part]):
                    passes = await run_plan(client, plan, prompts, partial(_show, length))
                results, _ = results_of(passes)
                measured["replay"] += [{"wished_acceptance_length": length} | asdict(r) for r in results]
                console.print(table(measured["replay"]))
                if into:
                    into.parent.mkdir(parents=True, exist_ok=True)
                    into.write_text(json.dumps(measured, indent=1) + "\n")
    return measured


def table(rows: list[dict[str, Any]]) -> Table:
    """Tokens/s by those of mode off: a row per acceptance length and mode, a column per concurrency."""
    clients = list(dict.fromkeys(row["concurrency"] for row in rows))
    grid = Table(title="tokens/s x off (acceptance length reached), replay drafter", title_justify="left")
    grid.add_column("acceptance length", justify="right")
    grid.add_column("mode")
    for count in clients:
        grid.add_column(f"{count} client{'s' if count > 1 else ''}", justify="right")
    drafted = [row for row in rows if row["mode"] != "off"]
    for length, mode in dict.fromkeys((row["wished_acceptance_length"], row["mode"]) for row in drafted):
        cells = {r["concurrency"]: r for r in drafted if (r["wished_acceptance_length"], r["mode"]) == (length, mode)}
        grid.add_row(f"{length:g}", mode, *(_cell(cells.get(count)) for count in clients))
    return grid


def _show(acceptance_length: float, step: Step) -> None:
    which = f"run {step.run}" if step.run else "warm-up"
    print(f"acceptance length {acceptance_length:g}: {step.concurrency} clients, {step.mode}, {which}", flush=True)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or row["ratio_to_off"] is None:
        return "-"
    reached = row["acceptance_length"]
    differing = f" {row['differing_requests']} differ!" if row["differing_requests"] else ""
    return f"{row['ratio_to_off']:.2f} ({'-' if reached is None else f'{reached:.2f}'}){differing}"


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--acceptance-lengths", type=_numbers, default=_numbers("1.0,1.5,2,3,3.8,5,6"))
    parser.add_argument("--concurrency", type=_numbers, default=_numbers("1,2,4,8,16,32"))
    parser.add_argument("--modes", default="off,auto")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plan = Plan(
        modes=tuple(options.modes.split(",")),
        concurrency=tuple(map(int, options.concurrency)),
        prompts=options.prompts,
        max_tokens=options.max_tokens,
        temperature=0.0,
        runs=options.runs,
        kinds=KINDS,
    )
    asyncio.run(measure(options.config, options.acceptance_lengths, plan, options.json))


if __name__ == "__main__":
    main()
