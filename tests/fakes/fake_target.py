"""A target that is a pure function, a drafter that checks what it is sent, and an engine put together from them."""

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from tandem.draft_tree import Draft, walk
from tandem.sampling import SamplingParams
from tandem.speculation import DraftShape, Round, SequenceDraft, SpeculationMode
from verifier_service.drafters import Drafter
from verifier_service.drafting import Drafting, DraftLimits, DraftReply
from verifier_service.engine import Emission, Engine
from verifier_service.kv_cache import KvCache
from verifier_service.metrics import VerifierMetrics
from verifier_service.model_runner import ModelRunner
from verifier_service.scheduler import Scheduler
from verifier_service.sequence import SequenceRequest
from verifier_service.speculation.controller import SpeculationController
from verifier_service.speculation.costs import StepCosts, StepCurve
from verifier_service.speculation.planner import SpeculationPlanner
from verifier_service.step import Segment, StepResult, Verdict

VOCAB = 50
BLOCK_SIZE = 4
MAX_DRAFT_NODES = 8


def next_token(prefix: list[int]) -> int:
    """The target's greedy choice."""
    return (31 * sum(prefix[-5:]) + 7 * len(prefix)) % VOCAB


def continuation(prompt: list[int], count: int) -> list[int]:
    """The plain loop: what the target alone would emit."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner:
    """Computes from what was written to the KV slots, so that a wrong block table or commit shows in the output."""

    def __init__(self, blocks: int, block_tokens: int):
        self._block_tokens = block_tokens
        self._slots: list[int | None] = [None] * (blocks * block_tokens)
        self.steps: list[list[Segment]] = []
        self.delay = 0.0
        self.fail_next = False

    def run(self, segments: list[Segment]) -> StepResult:
        self.steps.append(segments)
        time.sleep(self.delay)
        if self.fail_next:
            self.fail_next = False
            raise MemoryError("planted")
        verdicts = []
        for segment in segments:
            rows = segment.token_ids + (segment.draft.tokens if segment.draft else [])
            for i, token in enumerate(rows):
                self._slots[self._slot(segment.blocks, segment.start + i)] = token
            verdicts.append(self._decide(segment))
        return StepResult(verdicts, sum(s.rows for s in segments), 0.0)

    def read_features(self, blocks: list[int], start: int, count: int) -> bytes:
        """One byte per position: the token committed there."""
        return bytes(self._read(blocks, start + i) for i in range(count))

    def _decide(self, segment: Segment) -> Verdict:
        count = len(segment.token_ids)
        if not segment.samples:
            return Verdict(list(range(count)), [], [])
        prefix = [self._read(segment.blocks, p) for p in range(segment.start + count)]
        nodes, paths = segment.draft.tokens if segment.draft else [], _paths(segment.draft)
        accepted, chosen = walk(
            segment.draft, lambda index, depth: next_token(prefix + [nodes[i - 1] for i in paths[index]])
        )
        for depth, index in enumerate(accepted):
            self._slots[self._slot(segment.blocks, segment.start + count + depth)] = nodes[index - 1]
        return Verdict([*range(count), *(count + i - 1 for i in accepted)], chosen, [0.0] * len(chosen))

    def _read(self, blocks: list[int], position: int) -> int:
        token = self._slots[self._slot(blocks, position)]
        assert token is not None, f"position {position} was read before it was written"
        return token

    def _slot(self, blocks: list[int], position: int) -> int:
        return blocks[position // self._block_tokens] * self._block_tokens + position % self._block_tokens


def _paths(draft: Draft | None) -> list[list[int]]:
    """Of the root and each node the node indices from the root's child down to it."""
    paths: list[list[int]] = [[]]
    for i, parent in enumerate(draft.parents if draft else []):
        paths.append([*paths[parent], i + 1])
    return paths


def tree_around(right: list[int], nodes: int) -> Draft:
    """A tree that holds the first nodes // 2 tokens of `right`, each behind a sibling."""
    draft, parent = Draft([], [], []), 0
    for token in right[: nodes // 2]:
        draft.tokens.extend([(token + 1) % VOCAB, token])
        draft.parents.extend([parent, parent])
        draft.log_probs.extend([math.log(0.5)] * 2)
        parent = len(draft.tokens)
    return draft


@dataclass
class ThreadedDrafter:
    """A drafter in a thread of this process: answer() is given every round."""

    engine: Engine
    name: str = field(default="fake", kw_only=True)
    rounds: "queue.Queue[Round | None]" = field(default_factory=queue.Queue, kw_only=True)

    def __post_init__(self) -> None:
        self.drafter = Drafter(self.name, self.rounds.put)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.engine.attach(self.drafter)

    def leave(self) -> None:
        self.engine.detach(self.drafter)
        self.rounds.put(None)
        self.thread.join()

    def _serve(self) -> None:
        while (work := self.rounds.get()) is not None:
            drafts = self.answer(work)
            if drafts:
                self.engine.deliver(self.drafter, DraftReply(drafts, 0))

    def answer(self, work: Round) -> list[SequenceDraft]:
        raise NotImplementedError


@dataclass
class FakeDrafter(ThreadedDrafter):
    """Drafts from the features it was sent. `edit` turns the right tokens into what it proposes; a tree holds others
    beside them."""

    edit: Callable[[list[int]], list[int]] = lambda right: right
    answers: bool = True
    delay: float = 0.0
    """Seconds per draft."""
    held: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def answer(self, work: Round) -> list[SequenceDraft]:
        self._take(work)
        drafts = []
        for request in work.requests:
            epoch, context = self.held.get(request.sequence_id, (-1, []))
            if epoch != request.epoch or len(context) != request.base_position:
                self.engine.report_gap(self.drafter, request.sequence_id, request.epoch, len(context))
                continue
            right = continuation([*context, request.anchor], request.max_nodes)
            if request.shape is DraftShape.TREE and request.max_nodes > 1:
                draft = tree_around(self.edit(right), request.max_nodes)
            else:
                draft = Draft.block(self.edit(right), [0.0] * request.max_nodes)
            time.sleep(self.delay)
            drafts.append(SequenceDraft(request.sequence_id, request.epoch, request.base_position, draft))
        return drafts if self.answers else []

    def _take(self, work: Round) -> None:
        for context in work.contexts:
            epoch, held = self.held.get(context.sequence_id, (context.epoch, []))
            if context.epoch > epoch:
                epoch, held = context.epoch, []
            if context.start_position > len(held):
                self.faults.append(f"sequence {context.sequence_id}: {context.start_position} after {len(held)}")
            self.held[context.sequence_id] = (epoch, held[: context.start_position] + list(context.features))
        for sequence_id in work.released_sequence_ids:
            if self.held.pop(sequence_id, None) is None:
                self.faults.append(f"sequence {sequence_id} was released and never sent")


@dataclass
class Answer:
    """What a sink heard."""

    tokens: list[int] = field(default_factory=list)
    emissions: list[Emission] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, emission: Emission) -> None:
        assert not self.done.is_set(), "an emission after the last"
        self.tokens += emission.token_ids
        self.emissions.append(emission)
        if emission.finish_reason or emission.error:
            self.done.set()

    def wait(self) -> "Answer":
        assert self.done.wait(20), "the sequence did not end"
        return self

    @property
    def last(self) -> Emission:
        return self.emissions[-1]


class Bench:
    """An engine over the fake target, or over another runner."""

    def __init__(
        self,
        blocks: int = 65,
        block_tokens: int = 4,
        max_running: int = 8,
        max_waiting: int = 64,
        max_prefill_rows: int = 16,
        draft_timeout: float = 5.0,
        overlap: bool = True,
        runner: ModelRunner | None = None,
        keep_last_draft: bool = False,
    ):
        self.registry = CollectorRegistry()
        metrics = VerifierMetrics(self.registry)
        self.runner = FakeRunner(blocks, block_tokens)
        kv = KvCache(blocks, block_tokens)
        limits = DraftLimits(block_nodes=BLOCK_SIZE - 1, feature_bytes=1)
        drafting = Drafting(limits, kv, (runner or self.runner).read_features, metrics)
        curve = StepCurve((1, 1024), (0.001, 0.002))
        self.controller = SpeculationController(StepCosts(curve), max_nodes=MAX_DRAFT_NODES)
        planner = SpeculationPlanner(self.controller, drafting, metrics)
        self.scheduler = Scheduler(
            kv, max_running, max_waiting, max_prefill_rows, draft_timeout, overlap, planner.budget
        )
        self.engine = Engine(
            self.scheduler, runner or self.runner, drafting, planner, metrics, keep_last_draft=keep_last_draft
        )
        metrics.observe_load(self.engine.load)
        self._thread = threading.Thread(target=self.engine.run, daemon=True)
        self._thread.start()
        self._count = 0

    def answers(
        self, mode: SpeculationMode, temperature: float, prompts: list[list[int]], max_tokens: int
    ) -> list[Answer]:
        """All prompts at once, each with its index as the seed, and what became of them."""
        found = []
        for i, prompt in enumerate(prompts):
            request = SequenceRequest(
                request_id=f"{mode.value}-{temperature}-{len(prompt)}-{i}",
                token_ids=prompt,
                prompt_length=len(prompt),
                sampling=SamplingParams(temperature=temperature, seed=i),
                max_tokens=max_tokens,
                speculation_mode=mode,
                max_draft_nodes=MAX_DRAFT_NODES,
            )
            found.append(Answer())
            self.engine.submit(request, found[-1])
        return [answer.wait() for answer in found]

    def submit(self, prompt: list[int], max_tokens: int, **changes: object) -> Answer:
        from tandem.sampling import SamplingParams

        self._count += 1
        values: dict[str, object] = {
            "request_id": f"r{self._count}",
            "prompt_length": len(prompt),
            "speculation_mode": SpeculationMode.BLOCK,
            "max_draft_nodes": MAX_DRAFT_NODES,
            **changes,
        }
        request = SequenceRequest(  # type: ignore[arg-type]
            token_ids=prompt, sampling=SamplingParams(temperature=0.0), max_tokens=max_tokens, **values
        )
        answer = Answer()
        self.engine.submit(request, answer)
        return answer

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def close(self) -> None:
        """Stops the engine; the books must balance with nothing live."""
        self.engine.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.scheduler.audit()
        assert self.scheduler.kv.used == 0
        assert not self.scheduler.running
        assert not self.scheduler.waiting
