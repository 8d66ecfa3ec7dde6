"""The life of one generation: encode, check, run at the verifier, decode, cut at stop strings, keep in the session."""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gateway.admission import Admission
from gateway.chat_template import Flags, Turn
from gateway.metrics import GatewayMetrics
from gateway.output import Ending, Output, Piece
from gateway.requests import GenerationRequest, SamplingChoice
from gateway.resuming_stream import ResumingStream
from gateway.sessions import Sessions
from gateway.tokenizer import TargetTokenizer
from gateway.validation import (
    PromptRules,
    TargetInfo,
    check_lengths,
    check_request,
    check_tokenize,
    check_turns,
    prompt_too_long,
)
from gateway.verifier_client import Emission, SequenceRequest, SpeculationCounts, VerifierClient
from tandem.sampling import SamplingParams
from tandem.step_timing import StepTiming

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationEnd:
    """How a generation ended."""

    ending: Ending
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    counts: SpeculationCounts
    seed: int
    time_to_first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class Update:
    """One message to the client; the last one, and only it, has `end`."""

    piece: Piece
    timing: StepTiming | None = None
    end: GenerationEnd | None = None


Send = Callable[[Update], Awaitable[None]]


class Generator:
    """Runs generations."""

    def __init__(
        self,
        tokenizer: TargetTokenizer,
        default_sampling: SamplingParams,
        verifier: VerifierClient,
        sessions: Sessions,
        admission: Admission,
        metrics: GatewayMetrics,
        max_tokens_default: int | None,
    ):
        self._tokenizer = tokenizer
        self._rules = PromptRules(tokenizer.template_flags, tokenizer.media_ids)
        self._default_sampling = default_sampling
        self._verifier = verifier
        self._sessions = sessions
        self._admission = admission
        self._metrics = metrics
        self._max_tokens_default = max_tokens_default

    async def run(self, request: GenerationRequest, deadline: float | None, send: Send) -> Update:
        """Run one generation, send what it gives, and return the last update, which has `end`; `deadline` is in
        time.monotonic() seconds. The last update is for the caller to send, so that whoever reads it finds the slot
        free and the session idle.

        Raises the errors of tandem.errors, SessionNotFound, SessionBusy, TimeoutError and VerifierFailed. If it is
        cancelled, the verifier's call is too.
        """
        timer = _Timer(self._metrics)
        with self._admission.slot():
            target = self._verifier.require_ready()
            sampling = self._sampling(request.sampling)
            check_request(request, sampling, target, self._rules)
            with self._sessions.turn(request.session_id) as turn:
                turns = [*turn.history, *request.messages]
                prompt_ids = list(request.token_ids) or await self._encode(
                    request.prompt, turns, request.template_flags, target.max_context
                )
                sequence = self._sequence(request, prompt_ids, sampling, target)
                self._metrics.prompt_tokens.inc(len(prompt_ids))
                sent: list[str] = []
                try:
                    last = await self._stream(request, sequence, deadline, timer, sent, send)
                except (asyncio.CancelledError, TimeoutError):
                    if sent:
                        turn.commit(request.messages, "".join(sent))
                    raise
                turn.commit(request.messages, "".join(sent))
        _log_end(sequence.request_id, last)
        return last

    async def _stream(
        self,
        request: GenerationRequest,
        sequence: SequenceRequest,
        deadline: float | None,
        timer: "_Timer",
        sent: list[str],
        send: Send,
    ) -> Update:
        """Stream a sequence. All text goes to `sent`, all updates but the last to `send`."""
        output = Output(
            self._tokenizer.detokenizer(),
            self._tokenizer.has_text,
            request.stopping.stop_strings,
            sequence.stop_token_ids,
            sequence.max_tokens,
        )
        stream = ResumingStream(self._verifier, sequence, deadline, self._metrics.resubmissions.inc)
        last = Update(Piece())
        async with contextlib.aclosing(stream.emissions()) as emissions:
            async for emission in emissions:
                timer.tokens(len(emission.token_ids))
                ended_before = output.ending is not None
                update = Update(_decode(emission, output), emission.timing)
                if update.piece.text:
                    sent.append(update.piece.text)
                self._metrics.generation_tokens.inc(len(update.piece.token_ids))
                if output.ending is None:
                    await send(update)
                    continue
                last = last if ended_before else update
                # A stop string is this side's business: closing the stream cancels the verifier's call. Any other end
                # the verifier sees too, and its last message says how the sequence went.
                if output.ending.stop_string is not None or emission.end is not None:
                    break
        assert output.ending is not None
        timer.end()
        end = GenerationEnd(
            ending=output.ending,
            prompt_tokens=len(sequence.prompt_ids),
            completion_tokens=output.completion_tokens,
            cached_prompt_tokens=stream.cached_prompt_tokens,
            counts=stream.counts,
            seed=sequence.sampling.seed,
            time_to_first_token_seconds=timer.first_token_seconds,
            total_seconds=timer.total_seconds,
        )
        return dataclasses.replace(last, end=end)

    async def tokenize(self, prompt: str | None, turns: Sequence[Turn], flags: Flags) -> list[int]:
        """The ids that a generation would use for a prompt or for turns."""
        check_tokenize(prompt, turns, flags, self._rules)
        context = self._verifier.target.max_context if self._verifier.target else None
        return await self._encode(prompt, turns, flags, context)

    async def check_opening(self, turns: Sequence[Turn]) -> None:
        """InvalidRequest unless a session may begin with these turns: known roles, no more than can ever be used."""
        check_turns(turns)
        if turns:
            context = (self._verifier.target or self._verifier.require_ready()).max_context
            texts = [turn.content for turn in turns]
            if await asyncio.to_thread(self._tokenizer.surely_exceeds, texts, context):
                raise prompt_too_long("messages", None, context)

    def _sampling(self, choice: SamplingChoice) -> SamplingParams:
        default = self._default_sampling

        def pick(value: float | None, otherwise: float) -> float:
            return otherwise if value is None else value

        return SamplingParams(
            temperature=pick(choice.temperature, default.temperature),
            top_p=pick(choice.top_p, default.top_p),
            top_k=default.top_k if choice.top_k is None else choice.top_k,
            min_p=pick(choice.min_p, default.min_p),
            seed=secrets.randbits(64) if choice.seed is None else choice.seed,
        )

    async def _encode(self, prompt: str | None, turns: Sequence[Turn], flags: Flags, context: int | None) -> list[int]:
        """Ids of a prompt or of turns, on a thread, so that a long one does not hold up the other streams."""
        texts = [turn.content for turn in turns] if prompt is None else [prompt]

        def encode() -> list[int]:
            if context is not None and self._tokenizer.surely_exceeds(texts, context):
                raise prompt_too_long("messages" if prompt is None else "prompt", None, context)
            return self._tokenizer.encode_chat(turns, flags) if prompt is None else self._tokenizer.encode(prompt)

        return await asyncio.to_thread(encode)

    def _sequence(
        self, request: GenerationRequest, prompt_ids: list[int], sampling: SamplingParams, target: TargetInfo
    ) -> SequenceRequest:
        stopping = request.stopping
        max_tokens = check_lengths(
            request.input_field, len(prompt_ids), stopping, self._max_tokens_default, target.max_context
        )
        eos = () if stopping.ignore_eos else target.eos_token_ids
        return SequenceRequest(
            request_id=secrets.token_hex(8),
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_token_ids=frozenset([*stopping.stop_token_ids, *eos]),
            speculation_mode=request.speculation_mode,
            max_draft_nodes=request.max_draft_nodes,
            log_probs=request.log_probs,
        )


class _Timer:
    """Measures one generation, from its making on."""

    def __init__(self, metrics: GatewayMetrics):
        self._metrics = metrics
        self._started = self._previous = time.monotonic()
        self.first_token_seconds = 0.0
        self.total_seconds = 0.0

    def tokens(self, count: int) -> None:
        """So many tokens came in one message."""
        if count == 0:
            return
        now = time.monotonic()
        if self.first_token_seconds == 0.0:
            self.first_token_seconds = now - self._started
            self._metrics.time_to_first_token.observe(self.first_token_seconds)
        else:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - self._previous) / count)
        self._previous = now

    def end(self) -> None:
        """The generation ended normally."""
        self.total_seconds = time.monotonic() - self._started
        self._metrics.request_latency.observe(self.total_seconds)


def _decode(emission: Emission, output: Output) -> Piece:
    piece = output.push(emission.token_ids, emission.log_probs)
    if emission.end is not None and output.ending is None:
        piece += output.end(Ending(stop_token_id=emission.end.stop_token_id))
    return piece


def _log_end(request_id: str, last: Update) -> None:
    assert last.end
    end, counts = last.end, last.end.counts
    logger.info(
        "request %s: prompt=%d completion=%d finish=%s first_token=%.3fs total=%.3fs steps=%d drafted=%d accepted=%d",
        request_id,
        end.prompt_tokens,
        end.completion_tokens,
        "stop" if end.ending.stopped else "length",
        end.time_to_first_token_seconds,
        end.total_seconds,
        counts.steps,
        counts.drafted_tokens,
        counts.accepted_tokens,
    )
