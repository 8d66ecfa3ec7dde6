"""SpeculationService: one call is one drafter's connection."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from tandem.draft_tree import Draft, InvalidDraft
from tandem.errors import invalid
from tandem.rpc import abort_with
from tandem.speculation import PROTOCOL_VERSION, DraftShape, DraftSource, Round, SequenceDraft
from tandem.v1 import speculation_pb2, speculation_pb2_grpc
from verifier_service.drafters import Drafter
from verifier_service.drafting import DraftReply
from verifier_service.engine import Engine

logger = logging.getLogger(__name__)

_FEATURE_DTYPES = {
    "bfloat16": speculation_pb2.FEATURE_DTYPE_BFLOAT16,
    "float32": speculation_pb2.FEATURE_DTYPE_FLOAT32,
}
_SHAPES = {
    DraftShape.BLOCK: speculation_pb2.DRAFT_SHAPE_BLOCK,
    DraftShape.TREE: speculation_pb2.DRAFT_SHAPE_TREE,
}
_SOURCES = {
    speculation_pb2.DRAFT_SOURCE_UNSPECIFIED: DraftSource.DFLASH,
    speculation_pb2.DRAFT_SOURCE_DFLASH: DraftSource.DFLASH,
    speculation_pb2.DRAFT_SOURCE_NGRAM: DraftSource.NGRAM,
}
_COMPARED = {
    DraftSource.DFLASH: ("vocab_size", "hidden_size", "block_size", "target_layer_ids", "draft_model_fingerprint"),
    DraftSource.NGRAM: ("vocab_size",),
}
"""Fields of a registration that must agree with the verifier's."""


@dataclass(frozen=True)
class SpeculationInfo:
    """What a drafter's registration must agree with, and what it is told."""

    draft_model_fingerprint: str
    """Empty without a draft model: then target_layer_ids is empty, hidden_size 0, and all drafters are n-gram ones."""
    block_size: int
    max_draft_nodes: int
    """Nodes of a tree at most."""
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    verifier_name: str
    max_context: int


class SpeculationServicer(speculation_pb2_grpc.SpeculationServiceServicer):
    """Registers drafters, forwards rounds to them and their drafts to the engine."""

    def __init__(self, engine: Engine, info: SpeculationInfo | None):
        """`info` is None where speculation is not configured: every drafter is refused."""
        self._engine = engine
        self._info = info
        self._ended = asyncio.Event()

    def end(self) -> None:
        """End all streams in order: a server that stops breaks them off, and logs that as failures."""
        self._ended.set()

    async def Speculate(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[speculation_pb2.DrafterMessage], context: Any
    ) -> None:
        info = self._info
        if info is None:
            reason = "the verifier has neither draft_model nor drafter.draft_source ngram configured"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
            return
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        source = await self._check_registration(first, info, context)
        registered = speculation_pb2.Registered(
            feature_dtype=_FEATURE_DTYPES[info.dtype], verifier_name=info.verifier_name, max_context=info.max_context
        )
        await context.write(speculation_pb2.VerifierMessage(registered=registered))

        loop = asyncio.get_running_loop()
        outbox: asyncio.Queue[Round] = asyncio.Queue()

        def send(work: Round) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(outbox.put_nowait, work)

        drafter = Drafter(first.registration.drafter_name or context.peer(), send, source)
        logger.info("drafter %s (%s) registered from %s", drafter.name, source.value, context.peer())
        writer = asyncio.create_task(_write(outbox, context))
        reading = asyncio.create_task(self._read(drafter, info, context))
        ending = asyncio.create_task(self._ended.wait())
        self._engine.attach(drafter)
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                await reading
        finally:
            reading.cancel()
            ending.cancel()
            self._engine.detach(drafter)
            writer.cancel()
            logger.info("drafter %s left", drafter.name)

    async def _read(self, drafter: Drafter, info: SpeculationInfo, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            match message.WhichOneof("message"):
                case "drafts":
                    try:
                        reply = _to_reply(message.drafts, info)
                    except InvalidDraft as error:
                        logger.error("drafter %s sent an invalid draft, ending its stream: %s", drafter.name, error)
                        field, _, reason = str(error).partition(": ")
                        await abort_with(context, invalid(field, reason))
                    else:
                        self._engine.deliver(drafter, reply)
                case "gap":
                    gap = message.gap
                    self._engine.report_gap(drafter, gap.sequence_id, gap.epoch, gap.held_positions)
                case other:
                    await abort_with(context, invalid(other or "message", "expected drafts or gap after registration"))

    async def _check_registration(
        self, message: speculation_pb2.DrafterMessage, info: SpeculationInfo, context: Any
    ) -> DraftSource:
        if message.WhichOneof("message") != "registration":
            await abort_with(context, invalid("registration", "must be the first message of the stream"))
        given = message.registration
        source = _SOURCES.get(given.draft_source)
        if source is None:
            reason = f"must be {' or '.join(s.value for s in DraftSource)}, is {given.draft_source}"
            await abort_with(context, invalid("registration.draft_source", reason))
        pairs: list[tuple[str, Any, Any]] = [("protocol_version", given.protocol_version, PROTOCOL_VERSION)]
        for name in _COMPARED[source]:
            ours = getattr(info, name)
            theirs = getattr(given, name)
            pairs.append((name, tuple(theirs) if isinstance(ours, tuple) else theirs, ours))
        differing = [
            f"{name}: drafter {theirs or 'none'}, verifier {ours or 'none'}"
            for name, theirs, ours in pairs
            if theirs != ours
        ]
        if differing:
            text = "registration does not fit this verifier: " + "; ".join(differing)
            logger.error("drafter %s refused: %s", given.drafter_name or context.peer(), text)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        return source


async def _write(outbox: "asyncio.Queue[Round]", context: Any) -> None:
    while True:
        await context.write(_to_message(await outbox.get()))


def _to_message(work: Round) -> speculation_pb2.VerifierMessage:
    return speculation_pb2.VerifierMessage(
        round=speculation_pb2.Round(
            contexts=[
                speculation_pb2.SequenceContext(
                    sequence_id=c.sequence_id,
                    epoch=c.epoch,
                    start_position=c.start_position,
                    count=c.count,
                    features=c.features,
                    token_ids=c.token_ids,
                )
                for c in work.contexts
            ],
            requests=[
                speculation_pb2.DraftRequest(
                    sequence_id=r.sequence_id,
                    epoch=r.epoch,
                    base_position=r.base_position,
                    anchor=r.anchor,
                    max_nodes=r.max_nodes,
                    shape=_SHAPES[r.shape],
                    traceparent=r.traceparent,
                )
                for r in work.requests
            ],
            released_sequence_ids=work.released_sequence_ids,
        )
    )


def _to_reply(batch: speculation_pb2.DraftBatch, info: SpeculationInfo) -> DraftReply:
    """InvalidDraft, with the field's path, for a draft that breaks the protocol."""
    drafts = []
    for i, item in enumerate(batch.drafts):
        draft = Draft(list(item.tokens), list(item.parents), list(item.log_probs))
        try:
            if draft != Draft([], [], []):  # Nothing to propose.
                draft.check(info.vocab_size, max(info.block_size - 1, info.max_draft_nodes))
        except InvalidDraft as error:
            raise InvalidDraft(f"drafts[{i}].{error}") from None
        drafts.append(SequenceDraft(item.sequence_id, item.epoch, item.base_position, draft))
    return DraftReply(drafts, batch.compute_us)
