"""Acceptance length offline: drafts against answers that the target gave before, round by round as a service would.

The target's choices are fixed by its recorded answer, so no target runs here. At temperature 0 that is exactly what a
service accepts; at others it is what it accepts under the recorded seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from drafter_service.context_kv import ContextKV
from drafter_service.draft_model import BlockRequest, ContextRows, DraftModel
from drafter_service.ngram import NgramIndex
from tandem.config import DrafterConfig
from tandem.draft_tree import Draft, walk
from tandem.speculation import DraftShape
from verifier_service.features import FeatureProjection
from verifier_service.models.target_config import TargetConfig


@dataclass(frozen=True)
class Answer:
    """One recorded answer."""

    ids: list[int]
    """Prompt and answer."""
    answer_start: int
    group: str
    """What it is counted under."""
    taps: torch.Tensor
    """[at least tokens - 1, taps * hidden_size or wider]: the taps first."""


@dataclass
class Acceptance:
    """What became of drafts."""

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Tokens emitted per round, the bonus included."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def per_depth(self) -> list[float]:
        """Share of rounds that accepted a node at depth 1, 2, ..."""
        return [count / self.rounds for count in self.accepted_per_depth]

    def count(self, drafted: int, accepted: int, emitted: int) -> None:
        self.rounds += 1
        self.emitted += emitted
        self.drafted += drafted
        self.accepted_per_depth.extend([0] * (accepted - len(self.accepted_per_depth)))
        for depth in range(accepted):
            self.accepted_per_depth[depth] += 1

    def add(self, other: "Acceptance") -> None:
        self.rounds += other.rounds
        self.emitted += other.emitted
        self.drafted += other.drafted
        missing = len(other.accepted_per_depth) - len(self.accepted_per_depth)
        self.accepted_per_depth.extend([0] * missing)
        for depth, count in enumerate(other.accepted_per_depth):
            self.accepted_per_depth[depth] += count


@dataclass(frozen=True)
class DraftBudget:
    """What is asked for in every round."""

    shape: DraftShape
    nodes: int


class Source(Protocol):
    """Something that drafts. States are per answer; committed positions are told in order."""

    def begin(self, answer: Answer) -> Any: ...

    def commit(self, spans: list[tuple[Any, int, int]]) -> None:
        """Positions [start, end) of each state's answer are committed."""

    def draft(self, anchors: list[tuple[Any, int]], budget: DraftBudget) -> list[Draft]:
        """A draft behind each (state, position of the anchor)."""


def measure(source: Source, answers: Sequence[Answer], budget: DraftBudget) -> dict[str, Acceptance]:
    """Acceptance by group: every answer from its first token to its last."""
    results = {answer.group: Acceptance() for answer in answers}
    live = [(answer, source.begin(answer)) for answer in answers if len(answer.ids) - answer.answer_start > 1]
    bases = {id(answer): answer.answer_start for answer, _ in live}
    committed = {id(answer): 0 for answer, _ in live}
    while live:
        source.commit([(state, committed[id(answer)], bases[id(answer)]) for answer, state in live])
        drafts = source.draft([(state, bases[id(answer)]) for answer, state in live], budget)
        for (answer, _), draft in zip(live, drafts, strict=True):
            base, ids = bases[id(answer)], answer.ids

            def choose(_: int, depth: int, base: int = base, ids: list[int] = ids) -> int:
                return ids[base + 1 + depth] if base + 1 + depth < len(ids) else -1

            accepted, _ = walk(draft, choose)
            emitted = min(len(accepted) + 1, len(ids) - 1 - base)
            results[answer.group].count(len(draft), len(accepted), emitted)
            committed[id(answer)], bases[id(answer)] = base, base + emitted
        live = [(answer, state) for answer, state in live if bases[id(answer)] < len(answer.ids) - 1]
    return results


@dataclass(frozen=True)
class _DflashState:
    answer: Answer
    kv: ContextKV
    features: torch.Tensor


class DflashSource:
    """The draft model as the drafter service runs it, with the verifier's feature projection."""

    def __init__(
        self, folder: Path, target: Path, target_config: TargetConfig, dtype: torch.dtype, device: torch.device
    ):
        """StartupError names the file and key or tensor that is wrong."""
        self._model = DraftModel.load(folder, target, dtype, device)
        self._projection = FeatureProjection(folder, target_config, dtype, device)
        self._width = len(self._model.config.target_layer_ids) * target_config.hidden_size
        self._dtype, self._device = dtype, device
        self.config = self._model.config

    @torch.inference_mode()
    def begin(self, answer: Answer) -> _DflashState:
        taps = answer.taps[:, : self._width].to(self._device, self._dtype)
        return _DflashState(answer, self._model.new_context(), self._projection(taps))

    def commit(self, spans: list[tuple[_DflashState, int, int]]) -> None:
        self._model.write_context([ContextRows(s.kv, start, s.features[start:end]) for s, start, end in spans])

    def draft(self, anchors: list[tuple[_DflashState, int]], budget: DraftBudget) -> list[Draft]:
        requests = [BlockRequest(s.kv, base, s.answer.ids[base], budget.nodes, budget.shape) for s, base in anchors]
        return self._model.draft(requests)


class NgramSource:
    """The n-gram drafter, with the drafter section's defaults."""

    def __init__(self, section: DrafterConfig | None = None):
        self._section = section or DrafterConfig(draft_source="ngram")

    def begin(self, answer: Answer) -> tuple[Answer, NgramIndex]:
        return answer, NgramIndex(self._section.ngram_max, self._section.ngram_min)

    def commit(self, spans: list[tuple[tuple[Answer, NgramIndex], int, int]]) -> None:
        for (answer, index), start, end in spans:
            index.extend(answer.ids[start:end])

    def draft(self, anchors: list[tuple[tuple[Answer, NgramIndex], int]], budget: DraftBudget) -> list[Draft]:
        return [index.draft(answer.ids[base], budget.nodes, budget.shape) for (answer, index), base in anchors]
