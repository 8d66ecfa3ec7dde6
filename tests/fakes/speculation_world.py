"""A simulated machine, drafter and text for the speculation controller: true costs and acceptances it is not told."""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tandem.draft_tree import Draft
from verifier_service.speculation.controller import Asked, DecodeLoad, SpeculationController
from verifier_service.speculation.costs import StepCosts, StepCurve
from verifier_service.speculation.paths import Paths

MAX_NODES = 32
DEPTHS = 7
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CAPACITIES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1056)

StepSeconds = Callable[[int, int], float]
"""(rows, sequences) -> seconds"""
DraftSeconds = Callable[[int, int], float]
"""(sequences, nodes each) -> seconds"""


def dense_gpu(rows: int, sequences: int) -> float:
    """Bound by memory up to 128 rows, then by compute; captured for some numbers of rows."""
    padded = next((c for c in CAPACITIES if c >= rows), rows)
    return 0.02 * max(1.0, padded / 128) + 2e-5 * padded + 5e-5 * sequences


def moe(rows: int, sequences: int) -> float:
    """Each row loads experts until all are loaded: concave, then flat, then compute."""
    padded = next((c for c in CAPACITIES if c >= rows), rows)
    loaded = 1 - (1 - 8 / 256) ** padded
    return 0.004 + 0.05 * loaded + 6e-5 * padded


def cpu(rows: int, sequences: int) -> float:
    """Few cores: nearly proportional beyond a few rows."""
    return 0.013 + 0.0011 * rows + 0.0002 * sequences


def fast_drafter(sequences: int, nodes: int) -> float:
    return 0.0015 + 2e-5 * sequences + 1e-6 * sequences * nodes


def cpu_drafter(sequences: int, nodes: int) -> float:
    return 0.005 + 0.002 * sequences + 5e-5 * sequences * nodes


@dataclass
class World:
    """`truth`: acceptance of a node over what the draft model says, at depth 1 and its decline per depth."""

    step_seconds: StepSeconds
    draft_seconds: DraftSeconds
    truth: tuple[float, float] = (0.8, 0.95)
    confidence: float = 0.65
    """Mean probability of the best candidate."""
    noise: float = 0.1
    """Of measured times, relative."""
    drift: float = 0.3
    """Largest slow change of the machine's speed."""
    start_error: float = 0.08
    """Of the curve measured at start, relative."""
    captured: bool = False
    seed: int = 0
    drafts: list[Draft] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.drafts = [self._draft() for _ in range(256)]
        self.chances = [self._chances(draft) for draft in self.drafts]

    def _draft(self) -> Draft:
        """A DDTree of MAX_NODES nodes over random candidates per depth."""
        rows = []
        for _ in range(DEPTHS):
            best = min(0.99, max(0.05, self.random.betavariate(2 * self.confidence, 2 * (1 - self.confidence))))
            rest = [best, *((1 - best) * 0.5**i for i in range(1, 5))]
            rows.append(sorted(rest, reverse=True))
        draft = Draft([], [], [])
        heap = [(-math.log(p) * 1.0, 0, 0, i, math.log(p)) for i, p in enumerate(rows[0])]
        heapq.heapify(heap)
        while heap and len(draft) < MAX_NODES:
            path, parent, depth, token, log_prob = heapq.heappop(heap)
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.log_probs.append(log_prob)
            if depth + 1 < DEPTHS:
                for i, p in enumerate(rows[depth + 1]):
                    heapq.heappush(heap, (path - math.log(p), len(draft), depth + 1, i, math.log(p)))
        return draft

    def _chances(self, draft: Draft) -> list[float]:
        """Probability of each node given that its parent was accepted."""
        first, decline = self.truth
        depths = draft.depths
        return [first * decline ** (d - 1) * math.exp(lp) for d, lp in zip(depths, draft.log_probs, strict=True)]

    def expected(self, index: int, nodes: int) -> float:
        """Tokens a draft's first nodes add, on average."""
        reached, total = [1.0], 0.0
        for parent, chance in zip(self.drafts[index].parents[:nodes], self.chances[index], strict=False):
            reached.append(reached[parent] * chance)
            total += reached[-1]
        return total

    def accepted(self, index: int, nodes: int) -> np.ndarray:
        """[nodes] bool: which of a draft's first nodes a target accepts, drawn."""
        draft, chances = self.drafts[index], self.chances[index]
        taken = np.zeros(nodes, dtype=bool)
        at, draw = 0, self.random.random()
        for i in range(nodes):
            if draft.parents[i] != at:
                continue
            draw -= chances[i]
            if draw < 0:
                taken[i] = True
                at, draw = i + 1, self.random.random()
        return taken

    def rate_of_fixed(self, sequences: int, nodes: int) -> float:
        """Tokens per second if every step verifies so many nodes of each draft, 0 for plain decoding."""
        seconds = self.step_seconds(sequences * (1 + nodes), sequences)
        seconds += self.draft_seconds(sequences, nodes) if nodes else 0.0
        tokens = sequences * (1 + sum(self.expected(i, nodes) for i in range(len(self.drafts))) / len(self.drafts))
        return tokens / seconds

    def controller(self) -> SpeculationController:
        ladder = CAPACITIES if self.captured else LADDER
        seconds = [self.step_seconds(r, 1) * math.exp(self.random.gauss(0, self.start_error)) for r in ladder]
        curve = StepCurve(
            ladder, tuple(np.maximum.accumulate(seconds).tolist()), capacities=CAPACITIES if self.captured else ()
        )
        return SpeculationController(StepCosts(curve), MAX_NODES)


@dataclass
class Drive:
    """Runs a controller in a world, every step waiting for its drafts."""

    world: World
    controller: SpeculationController
    steps: int = 0
    slower: float = 0.0
    """Added to every round of drafts, seconds."""
    hidden: float = 0.0
    """What every step with drafts takes longer, seconds, beside the wait and the step that are measured."""
    sampled: bool = False
    """Whether the sequences sample."""
    first_id: int = 0
    """Of the sequences, which are numbered from here on."""
    chosen: list[tuple[Asked, int, int]] = field(default_factory=list)
    """Per step: whom it asked, nodes asked for, nodes verified in all."""

    def run(self, sequences: int, steps: int) -> float:
        """Tokens per second over so many steps, by true times and expected tokens, which keeps luck out."""
        tokens = seconds = 0.0
        for _ in range(steps):
            emitted, took = self.step(sequences)
            tokens += emitted
            seconds += took
        return tokens / seconds

    def step(self, n: int) -> tuple[float, float]:
        world, controller, rng, sampled = self.world, self.controller, self.world.random, self.sampled
        self.steps += 1
        speed = 1 + world.drift * math.sin(self.steps / 300)
        ids = tuple(range(self.first_id, self.first_id + n))
        sorts = {"sampled": n, "sampled_ids": ids} if sampled else {"greedy_ids": ids}
        order = controller.plan(DecodeLoad(n, n, 300.0, **sorts))
        asked = {Asked.NONE: 0, Asked.ONE: 1, Asked.ALL: n}[order.asked] if order.nodes else 0
        rows, waited, cycle, nodes = n, 0.0, 0.0, np.zeros(0, dtype=int)
        if asked:
            waited = world.draft_seconds(asked, order.nodes) + self.slower
            cycle = waited * speed * self._noise()
            picked = [rng.randrange(len(world.drafts)) for _ in range(asked)]
            drafts = [world.drafts[i].truncated(order.nodes) for i in picked]
            paths = Paths.of(drafts, [sampled] * asked, ids[:asked])
            controller.observe_wait(asked, order.nodes, cycle, True)
            waited += self.hidden
            cycle += self.hidden * speed
            controller.observe_drafts(paths, np.full(asked, order.nodes), np.ones(asked, dtype=bool))
            nodes = controller.budget(paths, n, n, n, n * 300.0).nodes[0]
            rows += int(nodes.sum())
        step = world.step_seconds(rows, n)
        measured = step * speed * self._noise()
        controller.observe_step(rows, n, n * 300.0, measured)
        emitted, drawn = float(n), n
        if nodes.any():
            taken = [world.accepted(i, k) for i, k in zip(picked, nodes, strict=True)]
            drawn += int(sum(t.sum() for t in taken))
            emitted += sum(world.expected(i, k) for i, k in zip(picked, nodes, strict=True))
            verified = np.arange(paths.cells.shape[1]) < nodes[:, None]
            accepted = np.zeros_like(verified)
            accepted[verified] = np.concatenate(taken)
            controller.observe_acceptance(paths, verified, accepted)
        controller.observe_cycle(n, n, n * 300.0, drawn, cycle + measured, order.asked is not Asked.NONE)
        self.chosen.append((order.asked, order.nodes, int(nodes.sum())))
        return emitted, waited + step

    def _noise(self) -> float:
        rng = self.world.random
        slow = 3.0 if rng.random() < 0.01 else 1.0
        return slow * math.exp(rng.gauss(0, self.world.noise))
