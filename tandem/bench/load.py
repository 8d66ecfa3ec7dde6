"""Closed-loop load: a fixed number of clients, each sending its next request when the last one has ended.

Every mode runs the same prompts with the same seeds and lets answers end where the target ends them: since
speculation does not change what is emitted, all modes emit the same tokens, and tokens/s compare. The figures say
whether they did (Result.same_tokens_as_off). Forcing every answer to max_tokens instead would measure what a model
babbles after its end, which drafts are better or worse at than at answers.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.bench.stats import Pass, Request
from tandem.client import AsyncClient, Message
from tandem.prompts import Prompt

Mode = Literal["off", "block"]

WARM_UP_TOKENS = 16
"""Ids per request of the warm-up, which sends all prompts in every mode: else the mode that comes second would
profit from prompts that the first one left in the prefix cache."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    modes: tuple[Mode, ...]
    concurrency: tuple[int, ...]
    prompts: int
    """Requests per pass; at least as many as clients."""
    max_tokens: int
    temperature: float
    repeats: int


@dataclass(frozen=True)
class Step:
    """One pass of a plan; repeat 0 is the warm-up."""

    mode: Mode
    concurrency: int
    repeat: int


def steps_of(plan: Plan) -> list[Step]:
    """Per concurrency: a warm-up of each mode, then the repeats, modes side by side, their order flipped each time."""
    steps = []
    for concurrency in plan.concurrency:
        for repeat in range(plan.repeats + 1):
            order = plan.modes if repeat % 2 else plan.modes[::-1]
            steps += [Step(mode, concurrency, repeat) for mode in order]
    return steps


async def run_plan(
    client: AsyncClient, plan: Plan, prompts: Sequence[Prompt], on_step: Callable[[Step], None]
) -> list[Pass]:
    """Runs all steps and returns the measured passes, per mode in the order of the repeats."""
    passes = []
    for step in steps_of(plan):
        on_step(step)
        sent = prompts[: max(plan.prompts, step.concurrency)]
        max_tokens = min(WARM_UP_TOKENS, plan.max_tokens) if step.repeat == 0 else plan.max_tokens
        requests = await run_pass(client, sent, step.mode, step.concurrency, max_tokens, plan.temperature)
        if step.repeat:
            passes.append(Pass(step.mode, step.concurrency, tuple(requests)))
    return passes


async def run_pass(
    client: AsyncClient, prompts: Sequence[Prompt], mode: Mode, concurrency: int, max_tokens: int, temperature: float
) -> list[Request]:
    """Sends every prompt, `concurrency` at a time. GenerationError of the first request that fails ends them all."""
    waiting = iter(enumerate(prompts))
    requests: list[Request] = []

    async def one_client() -> None:
        for seed, prompt in waiting:
            requests.append(await _request(client, prompt, mode, max_tokens, temperature, seed, concurrency == 1))

    clients = [asyncio.create_task(one_client()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return requests


async def _request(
    client: AsyncClient, prompt: Prompt, mode: Mode, max_tokens: int, temperature: float, seed: int, timing: bool
) -> Request:
    arrivals, timings = [], []
    started = time.perf_counter()
    generation = client.generate(
        [Message(turn.role, turn.content) for turn in prompt.messages],
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        speculation=mode,
        step_timing=timing,
    )
    async for chunk in generation:
        if chunk.token_ids:
            arrivals.append((time.perf_counter(), len(chunk.token_ids)))
        if chunk.step_timing is not None:
            timings.append(chunk.step_timing)
    finished = time.perf_counter()
    final = generation.final
    return Request(
        prompt_id=prompt.id,
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
