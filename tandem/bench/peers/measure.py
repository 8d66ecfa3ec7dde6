"""Runs the contenders: Tandem's modes through the gateway, peers in processes of their own."""

import time
from collections.abc import Callable, Sequence

from tandem.bench.peers.child import Child
from tandem.bench.peers.comparison import Answer, Turn, order
from tandem.client import AsyncClient, SpeculationMode

Show = Callable[[str], None]


def ours(mode: SpeculationMode) -> str:
    """The name of a mode among the contenders."""
    return f"tandem {mode}"


async def measure(
    client: AsyncClient,
    modes: Sequence[SpeculationMode],
    peers: Sequence[Child],
    prompts: Sequence[list[int]],
    max_tokens: int,
    runs: int,
    show: Show,
) -> tuple[list[Turn], int]:
    """All turns, by contender (Tandem's first, in the order given) and run, after one run that warms up; and how many
    tokens of Tandem's prompts, over all measured turns, came from its prefix cache."""
    mode_of = {ours(mode): mode for mode in modes}
    peer_of = {peer.name: peer for peer in peers}
    contenders = [*mode_of, *peer_of]
    turns, cached = [], 0
    for run in range(runs + 1):
        for name in order(contenders, run):
            show(f"{name}, {f'run {run} of {runs}' if run else 'warm-up'}")
            answers = []
            for prompt in prompts:
                if name in peer_of:
                    answers.append(await peer_of[name].answer(prompt, max_tokens))
                else:
                    answer, reused = await _through_stack(client, prompt, max_tokens, mode_of[name])
                    answers.append(answer)
                    cached += reused if run else 0
            if run:
                turns.append(Turn(name, run, tuple(answers)))
    return sorted(turns, key=lambda turn: (contenders.index(turn.contender), turn.run)), cached


async def _through_stack(
    client: AsyncClient, prompt: list[int], max_tokens: int, mode: SpeculationMode
) -> tuple[Answer, int]:
    """The answer, and how many tokens of the prompt were known."""
    started = time.perf_counter()
    first_seconds, first_tokens = 0.0, 0
    generation = client.generate(prompt, temperature=0, max_tokens=max_tokens, speculation_mode=mode)
    async for chunk in generation:
        if chunk.token_ids and not first_tokens:
            first_seconds, first_tokens = time.perf_counter() - started, len(chunk.token_ids)
    seconds = time.perf_counter() - started
    answer = Answer(tuple(generation.token_ids), seconds, first_seconds, first_tokens)
    return answer, generation.final.cached_prompt_tokens
