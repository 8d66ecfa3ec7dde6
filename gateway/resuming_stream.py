"""A sequence's emissions that outlive the verifier: when it goes away, the sequence is submitted again with the tokens
emitted so far, and goes on where it stopped. The random numbers are keyed by seed and position, so the text is the one
that would have come without the break."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable

from gateway.verifier_client import Emission, SequenceRequest, SpeculationCounts, VerifierClient, VerifierLost
from tandem.errors import Overloaded, Unavailable

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0
"""How long the verifier may be away, or full when it is back, before the generation fails."""

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0


class ResumingStream:
    """One generation at the verifier."""

    def __init__(
        self,
        verifier: VerifierClient,
        sequence: SequenceRequest,
        deadline: float | None,
        on_interruption: Callable[[], None],
        patience_seconds: float = PATIENCE_SECONDS,
    ):
        """`deadline` is in time.monotonic() seconds."""
        self._verifier = verifier
        self._sequence = sequence
        self._deadline = deadline
        self._on_interruption = on_interruption
        self._patience_seconds = patience_seconds
        self._generated: list[int] = []
        self._earlier_counts = SpeculationCounts()
        self._counts = SpeculationCounts()
        self._away_since: float | None = None
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self.cached_prompt_tokens = 0

    @property
    def counts(self) -> SpeculationCounts:
        """How speculation did so far, over all submissions."""
        total = SpeculationCounts()
        total.add(self._earlier_counts)
        total.add(self._counts)
        return total

    async def emissions(self) -> AsyncGenerator[Emission, None]:
        """Every token once. Closing the iterator cancels the verifier's call.

        Raises TimeoutError at the deadline, Unavailable or Overloaded when patience ends, and what
        VerifierClient.generate raises. If the verifier goes away behind the last token, the stream just ends.
        """
        resubmitted = False
        while True:
            try:
                emissions = self._verifier.generate(self._sequence, self._generated, self._time_left())
                async with contextlib.aclosing(emissions):
                    async for emission in emissions:
                        self._take(emission)
                        yield emission
                return
            except VerifierLost as lost:
                if self._complete:
                    return
                await self._wait(lost)
            except Overloaded as full:
                # A verifier that just came back is full of other resubmissions; a new request is turned away at once.
                if not resubmitted:
                    raise
                await self._wait(full)
            self._earlier_counts, self._counts = self.counts, SpeculationCounts()
            resubmitted = True

    @property
    def _complete(self) -> bool:
        generated, sequence = self._generated, self._sequence
        return bool(generated) and (len(generated) >= sequence.max_tokens or generated[-1] in sequence.stop_token_ids)

    def _take(self, emission: Emission) -> None:
        self._away_since = None
        self._generated += emission.token_ids
        if emission.timing:
            self._counts.add_step(emission.timing.drafted, emission.timing.accepted)
        if emission.cached_prompt_tokens is not None:
            self.cached_prompt_tokens = emission.cached_prompt_tokens
        if emission.end:
            self._counts = emission.end.counts
            self.cached_prompt_tokens = emission.end.cached_prompt_tokens

    async def _wait(self, error: VerifierLost | Overloaded) -> None:
        """Pause before the next submission; raises when patience has ended, TimeoutError at the deadline."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since, self._pause_seconds = now, FIRST_PAUSE_SECONDS
            self._on_interruption()
            logger.warning(
                "request %s: lost the verifier after %d tokens, submitting again: %s",
                self._sequence.request_id,
                len(self._generated),
                error,
            )
        if now - self._away_since >= self._patience_seconds:
            if isinstance(error, Overloaded):
                raise error
            raise Unavailable(f"the verifier went away and is not back after {self._patience_seconds:g}s: {error}")
        # Jitter, so that many generations do not come back at the same moment.
        pause = self._pause_seconds * random.uniform(0.5, 1.0)
        self._pause_seconds = min(self._pause_seconds * 2, LONGEST_PAUSE_SECONDS)
        async with asyncio.timeout(self._time_left()):
            await asyncio.sleep(pause)

    def _time_left(self) -> float | None:
        """Seconds to the deadline; TimeoutError if it passed."""
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline passed")
        return left
