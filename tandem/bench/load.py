"""Closed-loop load: a fixed number of clients, each sending its next request when the last one has ended.

Every mode runs the same prompts with the same seeds and lets answers end where the target ends them: since
speculation does not change what is emitted, all modes emit the same tokens, and tokens/s compare. The figures say
whether they did (Result.differing_requests). Forcing every answer to max_tokens instead would measure what a model
babbles after its end, which drafts are better or worse at than at answers.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tandem.bench.stats import Failure, Pass, Request
from tandem.client import AsyncClient, GenerateOptions, GenerationError, Message, SpeculationMode
from tandem.prompts import Kind, Prompt

WARM_UP_TOKENS = 16
"""Ids per request of the warm-up, which sends all prompts in every mode: else the mode that comes second would
profit from prompts that the first one left in the prefix cache."""

REQUEST_TIMEOUT_SECONDS = 600.0
"""A request that hangs fails, and the run goes on."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    modes: tuple[SpeculationMode, ...]
    concurrency: tuple[int, ...]
    prompts: int
    """Requests per pass; at least as many as clients."""
    max_tokens: int
    temperature: float
    runs: int
    kinds: tuple[Kind, ...]
    max_draft_nodes: int | None = None
    """Of requests in modes other than off; None is the server's."""


@dataclass(frozen=True)
class Step:
    """One pass of a plan; run 0 is the warm-up."""

    mode: SpeculationMode
    concurrency: int
    run: int


def steps_of(plan: Plan, finished: Collection[tuple[int, int]] = ()) -> list[Step]:
    """Per concurrency: a warm-up of each mode, then the runs, each of one pass per mode side by side. The order rotates
    from run to run, so that a machine that gets faster or slower favours no mode.

    finished: (concurrency, run) to leave out.
    """
    steps = []
    for concurrency in plan.concurrency:
        runs = [run for run in range(1, plan.runs + 1) if (concurrency, run) not in finished]
        for run in [0, *runs] if runs else []:
            first = run % len(plan.modes)
            steps += [Step(mode, concurrency, run) for mode in plan.modes[first:] + plan.modes[:first]]
    return steps


async def run_plan(
    client: AsyncClient,
    plan: Plan,
    prompts: Sequence[Prompt],
    on_step: Callable[[Step], None],
    earlier: Sequence[Pass] = (),
    on_pass: Callable[[Pass], None] = lambda measured: None,
) -> list[Pass]:
    """Runs the steps whose runs are not among the `earlier` passes; returns those and the measured ones."""
    passes = list(earlier)
    for step in steps_of(plan, {(p.concurrency, p.run) for p in earlier}):
        on_step(step)
        measured = await run_pass(client, plan, step, prompts[: max(plan.prompts, step.concurrency)])
        if step.run:
            passes.append(measured)
            on_pass(measured)
    return passes


async def run_pass(client: AsyncClient, plan: Plan, step: Step, prompts: Sequence[Prompt]) -> Pass:
    """Sends every prompt, `step.concurrency` at a time. A request that fails is recorded; the GenerationError of the
    first one is raised if none succeeds."""
    waiting = iter(enumerate(prompts))
    requests: list[Request] = []
    errors: list[GenerationError] = []
    failures: list[Failure] = []

    async def one_client() -> None:
        for index, prompt in waiting:
            try:
                requests.append(await _request(client, plan, step, index, prompt))
            except GenerationError as error:
                errors.append(error)
                failures.append(Failure(index, prompt.id, str(error)))

    clients = [asyncio.create_task(one_client()) for _ in range(step.concurrency)]
    try:
        await asyncio.gather(*clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    if not requests:
        raise errors[0]
    return Pass(step.mode, step.concurrency, step.run, tuple(requests), tuple(failures))


async def _request(client: AsyncClient, plan: Plan, step: Step, index: int, prompt: Prompt) -> Request:
    options: GenerateOptions = {
        "temperature": plan.temperature,
        "seed": index,
        "max_tokens": plan.max_tokens if step.run else min(WARM_UP_TOKENS, plan.max_tokens),
        "speculation_mode": step.mode,
        "step_timing": True,
    }
    if step.mode != "off":
        options["max_draft_nodes"] = plan.max_draft_nodes
    arrivals, timings = [], []
    messages = [Message(turn.role, turn.content) for turn in prompt.messages]
    started = time.perf_counter()
    generation = client.generate(messages, timeout=REQUEST_TIMEOUT_SECONDS, **options)
    async for chunk in generation:
        if chunk.token_ids:
            arrivals.append((time.perf_counter(), len(chunk.token_ids)))
        if chunk.step_timing is not None:
            timings.append(chunk.step_timing)
    finished = time.perf_counter()
    final = generation.final
    return Request(
        index=index,
        prompt_id=prompt.id,
        kind=prompt.kind,
        started=started,
        finished=finished,
        arrivals=tuple(arrivals),
        token_ids=tuple(generation.token_ids),
        steps=final.steps,
        drafts=final.drafts,
        drafted_tokens=final.drafted_tokens,
        accepted_tokens=final.accepted_tokens,
        accepted_per_position=tuple(final.accepted_per_position),
        timings=tuple(timings),
    )
