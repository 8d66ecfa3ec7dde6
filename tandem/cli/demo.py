"""`tandem demo`: the whole idea in a minute, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.console import console, errors, fail
from tandem.cli.options import DEFAULT_CONFIG, ConfigOption

if TYPE_CHECKING:
    from tandem.client import AsyncClient, SpeculationMode

QUESTION = "Why is the sky blue?"

MEASURED_TOKENS, MEASURED_PROMPTS, RUNS = 96, 4, 2


def demo(
    config: ConfigOption = DEFAULT_CONFIG,
    question: Annotated[str, typer.Option(help="What to ask.")] = QUESTION,
) -> None:
    """Start a stack, answer a question, compare the server's best mode with plain decoding, stop everything."""
    from tandem.cli.generate import describe
    from tandem.cli.runner import Interrupted, run
    from tandem.cli.stack import StackFailed
    from tandem.client import GenerationError
    from tandem.errors import StartupError

    try:
        run(_demo(config, question))
    except StartupError as error:
        fail(str(error), code=2)
    except StackFailed as error:
        fail(str(error))
    except GenerationError as error:
        fail(describe(error))
    except Interrupted as signalled:
        raise typer.Exit(128 + signalled.number) from None


async def _demo(config: Path, question: str) -> None:
    from tandem.cli.local_stack import local_stack
    from tandem.client import AsyncClient

    async with local_stack(config) as address, AsyncClient(address) as client:
        model = await client.model()
        console.print(f"{model.model} at {address}, {model.drafters} drafter(s)\n", markup=False)
        console.print(f"> {question}", style="bold", markup=False, soft_wrap=True)
        await _answer(client, question)
        served = model.speculation_modes
        best = next((mode for mode in ("auto", "tree", "block") if mode in served), None)
        await _compare(client, question, ("off", best) if best else ("off",))


async def _answer(client: AsyncClient, question: str) -> None:
    from tandem.cli.generate import figures
    from tandem.client import Message

    generation = client.generate([Message("user", question)], temperature=0, max_tokens=256)
    async for chunk in generation:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
    console.print(f"\n\n{figures(generation.final)}\n", style="dim", soft_wrap=True)


async def _compare(client: AsyncClient, question: str, modes: tuple[SpeculationMode, ...]) -> None:
    from tandem.bench.load import Plan, run_plan
    from tandem.bench.report import lines, results_of, tables
    from tandem.prompts import KINDS, Prompt, Turn, mixed_prompts

    plan = Plan(modes, (1,), MEASURED_PROMPTS, MEASURED_TOKENS, temperature=0.0, runs=RUNS, kinds=KINDS)
    prompts = [Prompt("demo", "chat", (Turn("user", question),)), *mixed_prompts(MEASURED_PROMPTS - 1)]
    with errors.status("measuring") as status:
        passes = await run_plan(
            client, plan, prompts, lambda step: status.update(f"measuring: speculation {step.mode}")
        )
    results, costs = results_of(passes)
    for table in tables(results, costs):
        console.print(table)
    for line in lines(results, costs):
        console.print(line, soft_wrap=True)
