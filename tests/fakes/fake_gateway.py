"""A gateway that talks GenerationService and health without a model, for tests of clients.

    python -m tests.fakes.fake_gateway --port N

Its answer to a prompt is the prompt's last text, word by word; token i of an answer is 100 + i. The modes that draft
send three ids per message, as if every draft of 7 had 2 tokens accepted; mode off and the default send one. A prompt's
first word may be a command: "overloaded", "refused", "broken" (UNAVAILABLE after one message), "slow" (endless, until
cancelled).
"""

import argparse
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.errors import Overloaded, Unavailable, invalid
from tandem.rpc import to_status
from tandem.speculation_modes import MODE_NUMBERS
from tandem.v1 import generation_pb2 as pb
from tandem.v1 import generation_pb2_grpc as pb_grpc

SERVICE = "tandem.v1.GenerationService"
STEP_SECONDS = 0.002
ACCEPTED, DRAFTED = 2, 7
DRAFTING_MODES = (pb.SPECULATION_MODE_BLOCK, pb.SPECULATION_MODE_TREE, pb.SPECULATION_MODE_AUTO)


class FakeGateway(pb_grpc.GenerationServiceServicer):
    """`with FakeGateway() as gateway:` serves; `requests` holds what came, `cancelled` is set on a cancellation."""

    def __init__(self, port: int = 0, modes: tuple[str, ...] = ("off", "block", "tree", "auto")) -> None:
        self.requests: list[Any] = []
        self.sessions: dict[str, list[Any]] = {}
        self.opened: list[Any] = []
        self.cancelled = threading.Event()
        self.before_generate: Callable[[Any], None] = lambda request: None
        self.before_reply: Callable[[Any, Any], None] = lambda request, reply: None
        self.modes = modes
        self._server = grpc.server(ThreadPoolExecutor(32))
        pb_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        servicer = health.HealthServicer()
        servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"

    def __enter__(self) -> "FakeGateway":
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stop(0).wait()

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self.before_generate(request)
        self.requests.append(request)
        if request.HasField("session_id"):
            history = self._session(request.session_id, context)
            history.extend(request.messages)
        text = request.prompt if request.HasField("prompt") else request.messages[-1].content
        match text.split()[0]:
            case "overloaded":
                context.abort_with_status(to_status(Overloaded("256 requests are running", 1.5)))
            case "refused":
                context.abort_with_status(to_status(invalid("sampling.top_p", "must be in (0, 1], is 2")))
        drafts_now = request.speculation_mode in DRAFTING_MODES
        words = [f"{word} " for word in text.split()]
        if request.stopping.HasField("max_tokens"):
            words = words[: request.stopping.max_tokens]
        if words[0] == "slow ":
            yield from self._slow(context)
            return
        sent, drafts, started = 0, 0, time.perf_counter()
        while sent < len(words):
            time.sleep(STEP_SECONDS)
            size = min(1 + ACCEPTED, len(words) - sent) if drafts_now and sent else 1
            drafts += drafts_now and sent > 0
            reply = pb.GenerateResponse(
                text="".join(words[sent : sent + size]), token_ids=range(100 + sent, 100 + sent + size)
            )
            if request.return_step_timing:
                timing = (4000, 1000, 12000, 1000) if drafts_now and sent else (0, 0, 9000, 1000)
                drafted = DRAFTED if drafts_now and sent else 0
                reply.step_timing.CopyFrom(pb.StepTiming(**dict(zip(TIMES, timing, strict=True)), drafted=drafted))
            self.before_reply(request, reply)
            yield reply
            sent += size
            if words[0] == "broken ":
                context.abort_with_status(to_status(Unavailable("no verifier can be reached")))
        if request.HasField("session_id"):
            history.append(pb.ChatMessage(role="assistant", content="".join(words)))
        final = pb.GenerationFinal(
            finish_reason=pb.FINISH_REASON_STOP,
            stop_token_id=2,
            usage=pb.Usage(prompt_tokens=5, completion_tokens=sent),
            seed=request.sampling.seed if request.sampling.HasField("seed") else 77,
            time_to_first_token_seconds=STEP_SECONDS,
            total_seconds=time.perf_counter() - started,
            speculation=pb.SpeculationStats(
                steps=sent,
                drafts=drafts,
                drafted_tokens=DRAFTED * drafts,
                accepted_tokens=ACCEPTED * drafts,
                accepted_per_position=[drafts] * ACCEPTED if drafts else [],
            ),
        )
        yield pb.GenerateResponse(final=final)

    def _slow(self, context: Any) -> Iterator[Any]:
        context.add_callback(self.cancelled.set)
        while context.is_active():
            yield pb.GenerateResponse(text="tick ", token_ids=[100])
            time.sleep(0.02)

    def OpenSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.opened.append(request)
        session_id = uuid.uuid4().hex
        self.sessions[session_id] = list(request.messages)
        return pb.OpenSessionResponse(session_id=session_id, expires_at=time.time() + 60)

    def CloseSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._session(request.session_id, context)
        del self.sessions[request.session_id]
        return pb.CloseSessionResponse()

    def GetSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        messages = self._session(request.session_id, context)
        return pb.GetSessionResponse(session_id=request.session_id, messages=messages, expires_at=time.time() + 60)

    def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetModelResponse(
            model="fake-model",
            max_context=1024,
            vocab_size=512,
            eos_token_ids=[2],
            default_sampling=pb.SamplingParams(temperature=0.2, top_p=0.9, top_k=0, min_p=0.0),
            default_speculation_mode=MODE_NUMBERS[self.modes[-1]],
            speculation_modes=[MODE_NUMBERS[mode] for mode in self.modes],
            max_draft_nodes=DRAFTED if len(self.modes) > 1 else 0,
            drafters=1,
            version="0.0.0",
        )

    def _session(self, session_id: str, context: Any) -> list[Any]:
        if session_id not in self.sessions:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no session {session_id}")
        return self.sessions[session_id]


TIMES = ("draft_us", "transfer_us", "verify_us", "host_us")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    with FakeGateway(parser.parse_args().port):
        stop.wait()


if __name__ == "__main__":
    main()
