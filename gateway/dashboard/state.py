"""What the page is told, as one JSON object."""

import math
import time
from collections.abc import Callable
from typing import Any

from gateway.tokenizer import TargetTokenizer
from gateway.verifier_client import VerifierClient
from tandem import __version__
from tandem.errors import Unavailable
from tandem.speculation_modes import mode_name
from tandem.v1 import generation_pb2, verification_pb2


class DashboardState:
    """Asks the verifier when the page asks; for the gateway's event loop."""

    def __init__(
        self,
        verifier: VerifierClient,
        tokenizer: TargetTokenizer,
        in_flight: Callable[[], int],
        sessions: Callable[[], int],
    ):
        self._verifier = verifier
        self._tokenizer = tokenizer
        self._in_flight = in_flight
        self._sessions = sessions

    async def read(self) -> dict[str, Any]:
        """Counters are since the verifier's start; rates are the page's to make. `clock` is in seconds, of any origin.
        Keys that are null are not known now: the verifier does not answer, or has nothing to tell yet."""
        verifier, target, load = self._verifier, self._verifier.target, None
        trouble = verifier.trouble
        if verifier.ready:
            try:
                load = await verifier.load()
            except Unavailable as error:
                trouble = str(error)
        state: dict[str, Any] = {
            "clock": time.monotonic(),
            "version": __version__,
            "gateway": {"in_flight": self._in_flight(), "sessions": self._sessions()},
            "verifier": {
                "address": verifier.address,
                "ready": load is not None,
                "trouble": trouble,
                "model": target.model if target else None,
                "max_context": target.max_context if target else None,
            },
            "drafters": None,
            "load": None,
            "steps": None,
            "speculation": None,
            "draft": None,
        }
        if load is None or target is None:
            return state
        speculates = target.max_draft_nodes > 0
        return state | {
            "drafters": {"expected": speculates, "names": list(load.drafter_names)},
            "load": _load(load),
            "steps": {
                "drafted": _timing(load.median_drafted_step) if load.HasField("median_drafted_step") else None,
                "plain": _timing(load.median_plain_step) if load.HasField("median_plain_step") else None,
            },
            "speculation": _speculation(load.speculation) if load.HasField("speculation") else None,
            "draft": {
                "shown": target.shows_last_draft,
                "last": _draft(load.last_draft, self._tokenizer.shown_text) if load.HasField("last_draft") else None,
            },
        }


def _load(load: verification_pb2.GetLoadResponse) -> dict[str, Any]:
    return {
        "running": load.running_sequences,
        "waiting": load.waiting_sequences,
        "kv_used": load.kv_blocks_used,
        "kv_cached": load.kv_blocks_cached,
        "kv_total": load.kv_blocks_total,
        "emitted_tokens": load.emitted_tokens,
        "drafts": load.drafts,
        "drafted_tokens": load.drafted_tokens,
        "accepted_tokens": load.accepted_tokens,
        "accepted_per_position": list(load.accepted_per_position),
        "graph_buckets": len(load.graph_buckets),
        "graph_buckets_captured": sum(bucket.captured for bucket in load.graph_buckets),
    }


def _timing(step: generation_pb2.StepTiming) -> dict[str, Any]:
    return {name: getattr(step, name) for name in ("draft_us", "transfer_us", "verify_us", "host_us", "rows")}


def _speculation(present: verification_pb2.SpeculationState) -> dict[str, Any]:
    return {
        "mode": mode_name(present.mode),
        "nodes": present.asked_nodes,
        "reason": present.reason,
        "gain": present.gain if math.isfinite(present.gain) and present.gain > 0 else None,
        "expected_tokens": present.expected_tokens,
        "draft_us": present.draft_us,
        "step_us": present.step_us,
        "plain_step_us": present.plain_step_us,
    }


def _draft(last: verification_pb2.VerifiedDraft, text_of: Callable[[int], str]) -> dict[str, Any]:
    """nodes[0] is the anchor; parents are indices of nodes."""
    accepted = set(last.accepted_nodes)
    nodes: list[dict[str, Any]] = [{"text": text_of(last.anchor), "parent": None, "probability": 1.0, "accepted": True}]
    drafted = zip(last.tokens, last.parents, last.log_probs, strict=True)
    for index, (token, parent, log_prob) in enumerate(drafted, 1):
        probability = min(1.0, math.exp(min(0.0, log_prob))) if math.isfinite(log_prob) else 0.0
        taken = index in accepted
        nodes.append({"text": text_of(token), "parent": parent, "probability": probability, "accepted": taken})
    return {
        "number": last.number,
        "age_seconds": last.age_ms / 1e3,
        "nodes": nodes,
        "bonus": text_of(last.bonus),
    }
