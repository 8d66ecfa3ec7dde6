"""A benchmark tool, not part of the product: a drafter whose acceptance length is set instead of trained.

It proposes the target's own recorded answer, corrupted position by position at a fixed rate, so that a verify step
accepts as many tokens as wished, on average, whatever the text. So `python -m benchmarks.replay` can ask what
speculation is worth at an acceptance length that no draft model at hand reaches. It knows the answers beforehand: its
figures say nothing about any drafter's quality, and its own compute is next to none.

    python -m benchmarks.replay_drafter --config x.yaml --recording answers.json --nodes 7 --acceptance-length 3

It registers as an n-gram drafter, so that the verifier sends it token ids: by them it finds the recorded answer.
"""

import argparse
import asyncio
import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from drafter_service.context_store import ContextStore
from drafter_service.messages import Answer, Gap
from drafter_service.metrics import DrafterMetrics
from drafter_service.rounds import Work
from drafter_service.verifier_link import VerifierLink
from tandem.checkpoints.model_json import read_vocab_size
from tandem.config import load_config
from tandem.draft_tree import Draft
from tandem.logs import setup_logging
from tandem.position_random import position_uniforms
from tandem.rpc import Health, bind, server_options, wait_for_signal
from tandem.speculation import PROTOCOL_VERSION, Context, DraftRequest, Round
from tandem.v1 import speculation_pb2

SERVICE = "tandem.Drafter"
LEAST_PROBABILITY = 1e-6
"""A log-probability must be finite, even where every token is wrong on purpose."""


@dataclass(frozen=True)
class Recorded:
    """What the target answered to one prompt, greedily and without drafts."""

    prompt: list[int]
    answer: list[int]


def save_recording(path: Path, recorded: Sequence[Recorded]) -> None:
    path.write_text(json.dumps([{"prompt": r.prompt, "answer": r.answer} for r in recorded]))


def load_recording(path: Path) -> list[Recorded]:
    return [Recorded(item["prompt"], item["answer"]) for item in json.loads(path.read_text())]


def acceptance_probability(acceptance_length: float, nodes: int) -> float:
    """The probability p of each node, given its parent, with which a block of `nodes` nodes emits `acceptance_length`
    tokens per step on average: 1 + p + ... + p^nodes. ValueError for a length that such a block cannot have."""
    if not 1 <= acceptance_length <= nodes + 1:
        raise ValueError(f"acceptance length must be in [1, {nodes + 1}] with {nodes} nodes, is {acceptance_length:g}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**depth for depth in range(nodes + 1)) < acceptance_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass
class _Following:
    """A sequence as far as it is known."""

    tokens: list[int] = field(default_factory=list)
    text: int | None = None
    """The recorded text that it followed when it was last drafted for."""


class ReplayDrafter:
    """Drafts for one verifier's stream."""

    def __init__(self, recorded: Sequence[Recorded], nodes: int, probability: float, vocab_size: int):
        """nodes: of a draft at most. probability: of each recorded token to be proposed as it is."""
        self._metrics = DrafterMetrics(CollectorRegistry())
        self._texts = [r.prompt + r.answer for r in recorded]
        self._nodes = nodes
        self._probability = probability
        self._log_prob = math.log(max(probability, LEAST_PROBABILITY))
        self._vocab_size = vocab_size
        self._store: ContextStore[_Following] = ContextStore(_Following)

    def work(self, rounds: Sequence[Round]) -> Answer:
        """Answers every request; with an empty draft where no recorded text goes on from there."""
        started = time.perf_counter()
        work = Work.of(rounds, self._store, self._vocab_size, self._take)
        ready = work.ready(self._metrics)
        drafts = [self._draft(request, following) for request, following in ready]
        return work.answer([r for r, _ in ready], drafts, time.perf_counter() - started, self._metrics)

    def _take(self, context: Context) -> Gap | None:
        following = self._store.extend(context.sequence_id, context.epoch, context.start_position, context.count)
        if isinstance(following, Gap):
            return following
        if following is not None:
            start = context.start_position
            following.tokens[start : start + context.count] = context.token_ids
        return None

    def _draft(self, request: DraftRequest, following: _Following) -> Draft:
        number = self._text_of(following, request.anchor)
        if number is None:
            return Draft.block([], [])
        following.text = number
        first = request.base_position + 1
        tokens = self._texts[number][first : first + min(self._nodes, request.max_nodes)]
        # Keyed by text and position: a position is right or wrong in every run and mode alike.
        draws = position_uniforms(number, first, len(tokens))
        proposed = [
            token if draw < self._probability else (token + 1) % self._vocab_size
            for token, draw in zip(tokens, draws, strict=True)
        ]
        return Draft.block(proposed, [self._log_prob] * len(proposed))

    def _text_of(self, following: _Following, anchor: int) -> int | None:
        """The recorded text that begins with the known tokens."""
        known = [*following.tokens, anchor]
        last = following.text
        candidates = range(len(self._texts)) if last is None else (last, *range(len(self._texts)))
        return next((number for number in candidates if self._texts[number][: len(known)] == known), None)


async def run_replay_drafter(config_path: Path, recording: Path, nodes: int, acceptance_length: float) -> None:
    """Draft until SIGTERM or SIGINT."""
    config = load_config(config_path)
    section = config.drafter
    setup_logging("replay drafter", section.log_level)
    recorded = load_recording(recording)
    probability = acceptance_probability(acceptance_length, nodes)
    vocab_size = read_vocab_size(config.target)
    server = grpc.aio.server(options=server_options())
    health = Health(server, [SERVICE], section.reflection)
    bind(server, section.listen, "drafter.listen")
    link = VerifierLink(
        verifier=section.verifier,
        registration=speculation_pb2.Registration(
            protocol_version=PROTOCOL_VERSION,
            draft_source=speculation_pb2.DRAFT_SOURCE_NGRAM,
            vocab_size=vocab_size,
            drafter_name="replay",
        ),
        reconnect_max_seconds=section.reconnect_max_seconds,
        new_worker=lambda _: ReplayDrafter(recorded, nodes, probability, vocab_size),
        on_registered=health.set_ready,
        metrics=DrafterMetrics(CollectorRegistry()),
    )
    await server.start()
    await health.set_ready(False)
    linked = asyncio.create_task(link.run())
    await wait_for_signal()
    await health.drain()
    linked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await linked
    await server.stop(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--recording", type=Path, required=True)
    parser.add_argument("--nodes", type=int, required=True, help="nodes of a draft at most")
    parser.add_argument("--acceptance-length", type=float, required=True)
    options = parser.parse_args()
    asyncio.run(run_replay_drafter(options.config, options.recording, options.nodes, options.acceptance_length))


if __name__ == "__main__":
    main()
