"""When to submit again, and when to give up."""

import time
from collections.abc import AsyncGenerator, Sequence

import pytest

from gateway import resuming_stream
from gateway.resuming_stream import ResumingStream
from gateway.verifier_client import (
    Emission,
    SequenceEnd,
    SequenceRequest,
    SpeculationCounts,
    VerifierFailed,
    VerifierLost,
)
from tandem.errors import Overloaded, Unavailable
from tandem.sampling import SamplingParams
from tandem.step_timing import StepTiming

REQUEST = SequenceRequest("id", [1, 2], SamplingParams(), 6, frozenset({99}), "default", None, False)


def step(*ids: int, end: SequenceEnd | None = None) -> Emission:
    return Emission(ids, [], StepTiming(0, 0, 0, 0, 5, 4, len(ids) - 1), 1, end)


class Verifier:
    """Plays one list of emissions and errors per submission; the last one for ever."""

    def __init__(self, *submissions: list[Emission | Exception]):
        self.submissions = list(submissions)
        self.generated: list[list[int]] = []

    async def generate(
        self, sequence: SequenceRequest, generated: Sequence[int], timeout: float | None
    ) -> AsyncGenerator[Emission, None]:
        self.generated.append(list(generated))
        play = self.submissions.pop(0) if len(self.submissions) > 1 else self.submissions[0]
        for item in play:
            if isinstance(item, Exception):
                raise item
            yield item


def stream(verifier: Verifier, deadline: float | None = None, patience: float = 5.0) -> ResumingStream:
    interruptions.clear()
    return ResumingStream(verifier, REQUEST, deadline, lambda: interruptions.append(1), patience)  # type: ignore[arg-type]


interruptions: list[int] = []


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming_stream, "FIRST_PAUSE_SECONDS", 0.001)


async def collect(resuming: ResumingStream) -> list[int]:
    return [id async for emission in resuming.emissions() for id in emission.token_ids]


async def test_tokens_come_once_and_figures_add_up() -> None:
    end = SequenceEnd(None, SpeculationCounts(2, 1, 4, 1, [1, 0, 0, 0]), 7)
    verifier = Verifier(
        [step(10), step(11, 12), VerifierLost("reset")],
        [VerifierLost("refused")],
        [VerifierLost("refused")],
        [step(13), step(14, 15, end=end)],
    )
    resuming = stream(verifier)
    assert await collect(resuming) == [10, 11, 12, 13, 14, 15]
    assert verifier.generated == [[], [10, 11, 12], [10, 11, 12], [10, 11, 12]]
    # Two steps of the first submission, and what the last one's end says.
    assert resuming.counts == SpeculationCounts(2 + 2, 2 + 1, 8 + 4, 1 + 1, [1 + 1, 0, 0, 0])
    assert resuming.cached_prompt_tokens == 7
    assert len(interruptions) == 1, "one interruption, three attempts"


async def test_patience_ends_in_unavailable() -> None:
    verifier = Verifier([step(10), VerifierLost("reset")], [VerifierLost("refused")])
    with pytest.raises(Unavailable, match=r"not back after 0.05s: refused"):
        await collect(stream(verifier, patience=0.05))
    assert len(verifier.generated) > 3


async def test_patience_starts_anew_with_every_token() -> None:
    """A verifier that restarts often but emits something each time is used."""
    lost = VerifierLost("reset")
    submissions = [[step(10 + n), lost] if n % 2 == 0 else [lost] for n in range(10)]
    verifier = Verifier(*submissions, [step(20)])
    assert await collect(stream(verifier)) == [10, 12, 14, 16, 18, 20]
    assert len(interruptions) == 5


async def test_a_full_verifier_refuses_new_sequences_but_is_waited_for_by_others() -> None:
    with pytest.raises(Overloaded):
        await collect(stream(Verifier([Overloaded("full", 1.0)])))
    verifier = Verifier([step(10), VerifierLost("reset")], [Overloaded("full", 1.0)], [step(11)])
    assert await collect(stream(verifier)) == [10, 11]
    verifier = Verifier([step(10), VerifierLost("reset")], [Overloaded("full", 1.0)])
    with pytest.raises(Overloaded):
        await collect(stream(verifier, patience=0.05))


@pytest.mark.parametrize("last", [[10, 11, 12, 13, 14, 15], [10, 99]], ids=["max_tokens", "stop_token"])
async def test_a_complete_sequence_is_not_submitted_again(last: list[int]) -> None:
    verifier = Verifier([step(*last), VerifierLost("reset")])
    assert await collect(stream(verifier)) == last
    assert len(verifier.generated) == 1


async def test_the_deadline_is_kept_while_waiting() -> None:
    verifier = Verifier([VerifierLost("refused")])
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        await collect(stream(verifier, deadline=started + 0.1))
    assert time.monotonic() - started < 0.5


async def test_other_failures_are_not_retried() -> None:
    verifier = Verifier([step(10), VerifierFailed("broken")])
    with pytest.raises(VerifierFailed):
        await collect(stream(verifier))
    assert len(verifier.generated) == 1
