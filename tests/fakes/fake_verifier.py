"""A verifier without a model: emits scripted tokens in scripted chunks, and misbehaves as told."""

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from tandem.rpc import Health, abort_with, bind, server_options
from tandem.tls import ServerFiles
from tandem.v1 import generation_pb2, verification_pb2, verification_pb2_grpc
from tests.fakes import tokenizers

Request = verification_pb2.VerifierServiceGenerateRequest
Response = verification_pb2.VerifierServiceGenerateResponse

SERVICE = "tandem.v1.VerifierService"


def letters(request: Request) -> list[int]:
    """A script that depends on prompt, seed and position alone, as a target's output does."""
    prompt = list(request.token_ids[: request.prompt_length])
    key = f"{prompt} {request.sampling.seed} "
    ordinary = range(len(tokenizers.SPECIAL), 97)
    return [
        ordinary[int.from_bytes(hashlib.sha256(f"{key}{position}".encode()).digest()[:4], "big") % len(ordinary)]
        for position in range(request.max_tokens)
    ]


@dataclass
class FakeVerifier(verification_pb2_grpc.VerifierServiceServicer):
    """Change its fields at any time; they hold from the next message on."""

    script: Callable[[Request], Sequence[int]] = letters
    """All tokens that follow a request's prompt; it is cut at stop tokens and max_tokens."""
    chunk_sizes: Sequence[int] = (1, 3, 2, 4)
    """Tokens per message, repeated."""
    stall_after: int | None = None
    """Emit so many tokens, counted from the prompt, then wait for `resume`."""
    die_after: int | None = None
    """Emit so many tokens, counted from the prompt, then end the server without a word."""
    final_apart: bool = False
    """Send `final` in a message without tokens."""
    error: Exception | tuple[grpc.StatusCode, str] | None = None
    """What Generate ends with at once."""
    max_context: int = 128
    vocab_size: int = 512
    speculation_modes: Sequence[int] = (
        generation_pb2.SPECULATION_MODE_OFF,
        generation_pb2.SPECULATION_MODE_BLOCK,
        generation_pb2.SPECULATION_MODE_TREE,
        generation_pb2.SPECULATION_MODE_AUTO,
    )
    max_draft_nodes: int = 16
    shows_last_draft: bool = False
    load: verification_pb2.GetLoadResponse = field(default_factory=lambda: verification_pb2.GetLoadResponse(drafters=3))
    requests: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    """Request ids of calls that the gateway ended."""
    time_remaining: list[float | None] = field(default_factory=list)
    running: int = 0
    port: int = 0
    tls: ServerFiles | None = None
    peer_certificates: list[bytes] = field(default_factory=list)
    """In PEM, of who called GetInfo."""
    resume: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """Serve, at the same port as before if it was started before."""
        self._server = grpc.aio.server(options=server_options())
        verification_pb2_grpc.add_VerifierServiceServicer_to_server(self, self._server)
        self.health = Health(self._server, [SERVICE], with_reflection=False)
        self.port = bind(self._server, f"127.0.0.1:{self.port}", "fake", self.tls)
        await self._server.start()
        await self.health.set_ready(True)

    async def stop(self) -> None:
        """Die: calls in flight break."""
        await self._server.stop(None)

    async def Generate(self, request: Request, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.requests.append(request)
        self.time_remaining.append(context.time_remaining())
        self.running += 1
        try:
            await self._generate(request, context)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running -= 1

    async def _generate(self, request: Request, context: Any) -> None:
        if isinstance(self.error, Exception):
            await abort_with(context, self.error)
        elif self.error:
            await context.abort(*self.error)
        done = len(request.token_ids) - request.prompt_length
        script = list(self.script(request))[: request.max_tokens]
        for size in itertools.cycle(self.chunk_sizes):
            await self._misbehave(done)
            for limit in (self.stall_after, self.die_after):
                if limit is not None:
                    size = min(size, limit - done)
            ids = script[done : done + size]
            stop = next((id for id in ids if id in request.stop_token_ids), None)
            if stop is not None:
                ids = ids[: ids.index(stop) + 1]
            done += len(ids)
            ended = stop is not None or done >= len(script)
            response = Response(token_ids=ids)
            if request.return_log_probs:
                response.log_probs.extend(-float(id) for id in ids)
            # As one block of at least 4 drafted tokens, of which all emitted ones but the bonus were accepted.
            response.step_timing.CopyFrom(
                generation_pb2.StepTiming(verify_us=10, rows=5, drafted=max(4, len(ids) - 1), accepted=len(ids) - 1)
            )
            response.cached_prompt_tokens = 1
            if ended and not self.final_apart:
                response.final.CopyFrom(self._final(request, done, stop))
            await context.write(response)
            if ended:
                break
            await asyncio.sleep(0)
        if self.final_apart:
            await self._misbehave(done)
            await context.write(Response(final=self._final(request, done, stop)))

    async def _misbehave(self, done: int) -> None:
        if self.die_after is not None and done >= self.die_after:
            self.die_after = None
            # Not awaited: stopping waits for this very call to end.
            self.death = asyncio.create_task(self.stop())
            await asyncio.Event().wait()
        if self.stall_after is not None and done >= self.stall_after:
            await self.resume.wait()

    def _final(self, request: Request, done: int, stop: int | None) -> verification_pb2.SequenceFinal:
        reason = generation_pb2.FINISH_REASON_LENGTH if stop is None else generation_pb2.FINISH_REASON_STOP
        return verification_pb2.SequenceFinal(
            finish_reason=reason,
            stop_token_id=stop,
            usage=generation_pb2.Usage(
                prompt_tokens=request.prompt_length, completion_tokens=done, cached_prompt_tokens=1
            ),
            speculation=generation_pb2.SpeculationStats(
                steps=7, drafts=7, drafted_tokens=28, accepted_tokens=9, accepted_per_position=[5, 3, 1, 0]
            ),
        )

    async def GetInfo(  # noqa: N802
        self, request: verification_pb2.GetInfoRequest, context: Any
    ) -> verification_pb2.GetInfoResponse:
        self.peer_certificates += context.auth_context().get("x509_pem_cert", [])
        return verification_pb2.GetInfoResponse(
            model="fake",
            max_context=self.max_context,
            vocab_size=self.vocab_size,
            eos_token_ids=[tokenizers.EOS],
            speculation_modes=self.speculation_modes,  # type: ignore[arg-type]
            default_speculation_mode=self.speculation_modes[-1],  # type: ignore[arg-type]
            max_draft_nodes=self.max_draft_nodes,
            shows_last_draft=self.shows_last_draft,
        )

    async def GetLoad(  # noqa: N802
        self, request: verification_pb2.GetLoadRequest, context: Any
    ) -> verification_pb2.GetLoadResponse:
        return self.load

    async def Abort(self, request: verification_pb2.AbortRequest, context: Any) -> verification_pb2.AbortResponse:  # noqa: N802
        return verification_pb2.AbortResponse()
