"""`tandem bench`: speculation modes side by side under closed-loop load."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.console import console, errors, fail
from tandem.cli.options import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from tandem.bench.load import Plan

MODES = ("off", "block")


def bench(
    address: Annotated[
        str | None, typer.Option(help=f"Measure the stack behind this gateway (default {DEFAULT_ADDRESS}).")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Start the stack of this file, measure it, stop it.")] = None,
    modes: Annotated[str, typer.Option(help="Of off and block, comma-separated.")] = "off,block",
    concurrency: Annotated[str, typer.Option(help="Numbers of clients, comma-separated.")] = "1,4,16",
    prompts: Annotated[int, typer.Option(min=1, help="Requests per pass; at least one per client.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer at most; answers may end earlier.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Seeds are fixed: modes emit the same at any.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Passes per mode and concurrency.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
) -> None:
    """Measure tokens/s, latencies and acceptance over the shipped prompts; modes alternate within one run."""
    if address is not None and config is not None:
        fail("--address and --config exclude each other", code=2)
    if json_path is not None:
        try:
            json_path.open("a").close()  # fail now, not after the measurement
        except OSError as error:
            fail(f"--json {json_path}: {error.strerror}", code=2)

    from tandem.bench.load import Plan
    from tandem.cli.runner import Interrupted, run
    from tandem.cli.stack import StackFailed
    from tandem.client import GenerationError
    from tandem.errors import StartupError

    plan = Plan(
        modes=_modes(modes),
        concurrency=_numbers("--concurrency", concurrency),
        prompts=prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        repeats=repeats,
    )
    try:
        measured = run(_measure(plan, address or DEFAULT_ADDRESS, config))
    except StartupError as error:
        fail(str(error), code=2)
    except GenerationError as error:
        from tandem.cli.generate import describe

        fail(describe(error))
    except StackFailed as error:
        fail(str(error))
    except Interrupted as signalled:
        raise typer.Exit(128 + signalled.number) from None
    if json_path is not None:
        json_path.write_text(json.dumps(measured, indent=2) + "\n")
        console.print(f"written to {json_path}")


async def _measure(plan: Plan, address: str, config: Path | None) -> dict[str, Any]:
    import yaml
    from rich.status import Status

    from tandem.bench.load import Step, run_plan
    from tandem.bench.report import as_json, lines, results_of, table
    from tandem.cli.local_stack import local_stack
    from tandem.client import AsyncClient
    from tandem.errors import StartupError
    from tandem.prompts import mixed_prompts

    async with contextlib.AsyncExitStack() as entered:
        if config is not None:
            address = await entered.enter_async_context(local_stack(config))
        client = await entered.enter_async_context(AsyncClient(address))
        model = await client.model()
        if missing := [mode for mode in plan.modes if mode not in model.speculation_modes]:
            raise StartupError(
                f"--modes {missing[0]}: the stack at {address} serves {', '.join(model.speculation_modes)}"
            )
        status = entered.enter_context(Status("", console=errors))

        def show(step: Step) -> None:
            which = f"repeat {step.repeat} of {plan.repeats}" if step.repeat else "warm-up"
            status.update(f"{step.concurrency} clients, {step.mode}, {which}")

        prompts = mixed_prompts(max(plan.prompts, *plan.concurrency))
        passes = await run_plan(client, plan, prompts, show)
    results, costs = results_of(passes)
    console.print(table(results))
    for line in lines(results, costs):
        console.print(line, soft_wrap=True)
    return as_json(results, costs, plan, yaml.safe_load(config.read_text()) if config else {}, asdict(model))


def _modes(text: str) -> tuple[Any, ...]:
    modes = tuple(dict.fromkeys(text.split(",")))
    if wrong := [mode for mode in modes if mode not in MODES]:
        fail(f"--modes: {wrong[0]!r} is none of {', '.join(MODES)}", code=2)
    return modes


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = text.split(",")
    if wrong := [word for word in words if not word.isdecimal() or int(word) < 1]:
        fail(f"{option}: {wrong[0]!r} is not a number of at least 1", code=2)
    return tuple(dict.fromkeys(int(word) for word in words))
