"""`tandem bench`: speculation modes side by side under closed-loop load; or a step's time by parts, or peers beside."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.bench_peers import PEERS
from tandem.cli.console import console, errors, fail
from tandem.cli.options import DEFAULT_ADDRESS, MaxDraftNodesOption, SpeculationMode
from tandem.prompts import KINDS

if TYPE_CHECKING:
    from tandem.bench.load import Plan

MODES = tuple(mode.value for mode in SpeculationMode if mode is not SpeculationMode.DEFAULT)


def bench(
    address: Annotated[
        str | None, typer.Option(help=f"Measure the stack behind this gateway (default {DEFAULT_ADDRESS}).")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Start the stack of this file, measure it, stop it.")] = None,
    modes: Annotated[
        str | None, typer.Option(help="Of off, block, tree and auto, comma-separated. Unset: all that are served.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Numbers of clients, comma-separated. Unset: 1,4,16; with --profile 1,4.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Requests per pass; at least one per client.")] = 12,
    kinds: Annotated[str, typer.Option(help="Kinds of prompts, comma-separated.")] = ",".join(KINDS),
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer at most; answers may end earlier.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Seeds are fixed: modes emit the same at any.")] = 0.0,
    max_draft_nodes: MaxDraftNodesOption = None,
    runs: Annotated[int, typer.Option(min=1, help="Alternations of the modes per concurrency.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Keep finished passes in this file; if it holds some, go on from there.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Instead: where a step's time goes, of the target that --config names.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            help=f"Instead: beside these peers, one request at a time. Of {', '.join(PEERS)}, comma-separated."
        ),
    ] = None,
    llama_python: Annotated[
        Path | None, typer.Option(help="Python that has llama-cpp-python, for --against llama.cpp. Unset: this one.")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="The target's GGUF, for --against llama.cpp. Unset: the demo target's.")
    ] = None,
) -> None:
    """Measure tokens/s, latencies and acceptance over the shipped prompts; modes alternate within every run."""
    if address is not None and config is not None:
        fail("--address and --config exclude each other", code=2)
    if profile and against is not None:
        fail("--profile and --against exclude each other", code=2)
    if (profile or against is not None) and config is None:
        fail(f"{'--profile' if profile else '--against'} needs --config", code=2)
    if against is not None and (temperature or concurrency not in (None, "1")):
        fail("--against: measured greedily and one request at a time, without --temperature and --concurrency", code=2)
    if json_path is not None:
        try:
            json_path.open("a").close()  # fail now, not after the measurement
        except OSError as error:
            fail(f"--json {json_path}: {error.strerror}", code=2)

    from tandem.bench.load import Plan
    from tandem.cli.bench_peers import measure_peers
    from tandem.cli.bench_profile import measure_steps
    from tandem.cli.runner import Interrupted, run
    from tandem.cli.stack import StackFailed
    from tandem.client import GenerationError
    from tandem.errors import StartupError

    plan = Plan(
        modes=_words("--modes", modes, MODES) if modes is not None else (),
        concurrency=_numbers("--concurrency", concurrency or ("1,4" if profile else "1,4,16")),
        prompts=prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        runs=runs,
        kinds=_words("--kinds", kinds, KINDS),
        max_draft_nodes=max_draft_nodes,
    )
    if profile and config:
        measuring = measure_steps(config, plan.concurrency, runs)
    elif against is not None and config:
        measuring = measure_peers(plan, config, _words("--against", against, PEERS), llama_python, gguf)
    else:
        measuring = _measure(plan, address or DEFAULT_ADDRESS, config, resume)
    try:
        measured = run(measuring)
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


async def _measure(plan: Plan, address: str, config: Path | None, resume: Path | None) -> dict[str, Any]:
    """Runs the plan; without modes, with all that the stack serves."""
    import yaml
    from rich.status import Status

    from tandem.bench.load import Step, run_plan
    from tandem.bench.passes import PassFile
    from tandem.bench.report import as_json, lines, results_of, tables
    from tandem.cli.local_stack import local_stack
    from tandem.client import AsyncClient
    from tandem.errors import StartupError
    from tandem.prompts import mixed_prompts

    async with contextlib.AsyncExitStack() as entered:
        if config is not None:
            address = await entered.enter_async_context(local_stack(config))
        client = await entered.enter_async_context(AsyncClient(address))
        model = await client.model()
        served: tuple[Any, ...] = tuple(mode for mode in MODES if mode in model.speculation_modes)
        if missing := [mode for mode in plan.modes if mode not in served]:
            raise StartupError(f"--modes {missing[0]}: the stack at {address} serves {', '.join(served)}")
        plan = replace(plan, modes=plan.modes or served)
        status = entered.enter_context(Status("", console=errors))

        def show(step: Step) -> None:
            which = f"run {step.run} of {plan.runs}" if step.run else "warm-up"
            now = f"{step.concurrency} clients, {step.mode}, {which}"
            status.update(now)
            if not errors.is_terminal:
                errors.print(now)

        prompts = mixed_prompts(max(plan.prompts, *plan.concurrency), plan.kinds)
        if resume is None:
            passes = await run_plan(client, plan, prompts, show)
        else:
            kept = PassFile(resume, plan, model.model)
            passes = await run_plan(client, plan, prompts, show, kept.passes, kept.append)
    results, costs = results_of(passes)
    for table in tables(results, costs):
        console.print(table)
    for line in lines(results, costs):
        console.print(line, soft_wrap=True)
    return as_json(results, costs, plan, yaml.safe_load(config.read_text()) if config else {}, asdict(model))


def _words(option: str, text: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
    words = tuple(dict.fromkeys(text.split(",")))
    if wrong := [word for word in words if word not in allowed]:
        fail(f"{option}: {wrong[0]!r} is none of {', '.join(allowed)}", code=2)
    return words


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = text.split(",")
    if wrong := [word for word in words if not word.isdecimal() or int(word) < 1]:
        fail(f"{option}: {wrong[0]!r} is not a number of at least 1", code=2)
    return tuple(dict.fromkeys(int(word) for word in words))
