"""What the engine tells of a traced sequence, and that drafts are told an end however they end."""

from dataclasses import dataclass, field

from tandem.spans import DecodeStep
from tests.fakes.fake_target import Bench, FakeDrafter, continuation

PROMPT = [3, 1, 4, 1, 5]
TOKENS = 20


@dataclass
class RecordedDraft:
    traceparent: str
    ends: list[tuple[str, int]] = field(default_factory=list)

    def end(self, outcome: str, nodes: int = 0, compute_us: int = 0) -> None:
        self.ends.append((outcome, nodes))


@dataclass
class Recorder:
    """Records every second draft."""

    told: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    prompt: tuple[int, int] | None = None
    steps: list[DecodeStep] = field(default_factory=list)
    drafts: list[RecordedDraft] = field(default_factory=list)
    asks: int = 0

    def queued(self, came: float, started: float) -> None:
        self.told.append("queued")
        self.times += [came, started]

    def prefilled(self, ended: float, prompt_tokens: int, cached_tokens: int) -> None:
        self.told.append("prefilled")
        self.times.append(ended)
        self.prompt = prompt_tokens, cached_tokens

    def asked(self) -> RecordedDraft | None:
        self.asks += 1
        if self.asks % 2 == 0:
            return None
        self.drafts.append(RecordedDraft(f"parent {self.asks}"))
        return self.drafts[-1]

    def stepped(self, step: DecodeStep) -> None:
        self.told.append("stepped")
        self.times += [step.started, step.ended]
        self.steps.append(step)


def test_a_life_is_told_in_order() -> None:
    """Once each: queue, prompt in chunks, every decode step; with what the counters count."""
    bench, spans = Bench(max_prefill_rows=3), Recorder()
    drafter = FakeDrafter(bench.engine)
    answer = bench.submit(PROMPT, TOKENS, spans=spans).wait()
    drafter.leave()
    bench.close()
    counts = answer.last.sequence.counts
    assert spans.told == ["queued", "prefilled", *["stepped"] * counts.steps]
    assert spans.times == sorted(spans.times)
    assert spans.prompt == (len(PROMPT), 0)
    assert sum(step.accepted for step in spans.steps) == counts.accepted > 0
    assert sum(step.nodes for step in spans.steps) == counts.drafted
    assert 1 + sum(step.tokens for step in spans.steps) == TOKENS
    recorded = [step for step in spans.steps if step.draft_recorded]
    assert len(recorded) == len(spans.drafts) < sum(step.asked for step in spans.steps)
    assert [draft.ends for draft in spans.drafts] == [[("drafted", step.nodes)] for step in recorded]


def test_the_drafter_is_told_of_recorded_drafts() -> None:
    bench, spans = Bench(), Recorder()
    drafter = FakeDrafter(bench.engine)
    seen: list[str] = []
    answer = drafter.answer
    drafter.answer = lambda work: (seen.extend(r.traceparent for r in work.requests), answer(work))[1]  # type: ignore
    bench.submit(PROMPT, TOKENS, spans=spans).wait()
    drafter.leave()
    bench.close()
    assert seen == [f"parent {n + 1}" if n % 2 == 0 else "" for n in range(spans.asks)]


def test_a_late_draft_ends() -> None:
    bench, spans = Bench(draft_timeout=0.05), Recorder()
    drafter = FakeDrafter(bench.engine, answers=False)
    answer = bench.submit(PROMPT, TOKENS, spans=spans).wait()
    drafter.leave()
    bench.close()
    assert answer.tokens == continuation(PROMPT, TOKENS)
    assert [draft.ends for draft in spans.drafts] == [[("late", 0)]]


def test_a_draft_whose_drafter_leaves_ends() -> None:
    bench, spans = Bench(), Recorder()
    drafter = FakeDrafter(bench.engine, answers=False)
    answer = bench.submit(PROMPT, TOKENS, spans=spans)
    while not spans.drafts:
        pass
    drafter.leave()
    answer.wait()
    bench.close()
    assert [draft.ends for draft in spans.drafts] == [[("lost", 0)]]
