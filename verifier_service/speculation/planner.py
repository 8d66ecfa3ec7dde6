"""Applies modes, limits and the controller's decisions to sequences, and tells the controller how they went."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tandem.speculation import DraftShape, SpeculationMode
from verifier_service.drafting import Drafting, DraftOrder
from verifier_service.metrics import VerifierMetrics
from verifier_service.sequence import PendingDraft, Sequence
from verifier_service.speculation.controller import Asked, DecodeLoad, SpeculationController, are_many, size_of
from verifier_service.speculation.paths import Paths, mass_by_depth
from verifier_service.speculation.present import Present
from verifier_service.step import Segment, Verdict

_REST_STEPS = 15
"""While nothing is drafted, so many steps of as many sequences go by unseen between two: looking costs a small target
two percent of its step."""
_LOOK_BACK = 8
"""Drafts that are learned from at once: a few at a time take as long as one."""
_FIXED_SHAPES = {SpeculationMode.BLOCK: DraftShape.BLOCK, SpeculationMode.TREE: DraftShape.TREE}


@dataclass(frozen=True)
class _Drafted:
    """The drafts of the step that was planned last."""

    sequences: list[Sequence]
    paths: Paths
    asked: np.ndarray
    """[drafts] int: nodes that were asked for."""
    auto: np.ndarray
    """[drafts] bool: of sequences in auto mode."""
    expected_tokens: float
    """Of the whole step."""


@dataclass(frozen=True)
class _Lesson:
    """How drafts went."""

    drafted: _Drafted
    accepted: list[tuple[int, list[int]]]
    """Of each: how many nodes were verified, and the indices of those that were accepted."""


@dataclass(frozen=True)
class _Cycle:
    """A step to come, and the time since the one before."""

    decoding: int
    """Sequences that decode, whether they step or wait for a draft."""
    drafted: bool
    """Whether drafts were asked for, or drafters sent what they need."""
    unseen: bool = False
    """Whether nothing is decided or learned in it."""


class SpeculationPlanner:
    """Called by engine and scheduler, in the engine's thread."""

    def __init__(self, controller: SpeculationController, drafting: Drafting, metrics: VerifierMetrics):
        self._controller = controller
        self._drafting = drafting
        self._metrics = metrics
        self._drafted: _Drafted | None = None
        self._lessons: list[_Lesson] = []
        """Not learned yet."""
        self._cycle: _Cycle | None = None
        self._next_cycle: _Cycle | None = None
        """None where it is not the controller's to account for: nothing in auto mode, or others' drafts."""
        self._rest_left = 0
        self._resting = 0
        """Size of the steps that go by unseen."""
        self._latest = 0
        """The youngest sequence of the last step that was looked at."""

    def orders(self, stepped: list[Sequence], running: list[Sequence]) -> dict[Sequence, DraftOrder]:
        """What to ask for now, of the sequences that just stepped."""
        if self._rests(stepped):
            self._next_cycle = _Cycle(len(stepped), False, unseen=True)
            return {}
        orders: dict[Sequence, DraftOrder] = {}
        auto: list[Sequence] = []
        self._next_cycle = None
        for sequence in stepped:
            request = sequence.request
            shape = _FIXED_SHAPES.get(request.speculation_mode)
            if shape:
                orders[sequence] = DraftOrder(request.max_draft_nodes, shape)
            elif request.speculates:
                auto.append(sequence)
        if not auto or not self._drafting.pool:
            return orders
        decoding = [s for s in auto if s.uncommitted == 1]
        awaited = [s for s in running if s.uncommitted == 1]
        if decoding:
            self._controller.plan(self._load(decoding, stepped, awaited))
        order = self._controller.order
        if order.asked is Asked.ONE:
            cheapest = min(decoding, key=self._drafting.missing, default=None)
            auto = [cheapest] if cheapest else []
        elif self._controller.supplied is Asked.NONE:
            auto = []
        # In plain steps among those that draft, drafters are still sent what they will need.
        for sequence in auto:
            orders[sequence] = DraftOrder(min(order.nodes, sequence.request.max_draft_nodes), DraftShape.TREE)
        if len(orders) == len(auto):
            self._next_cycle = _Cycle(len(awaited), bool(auto))
        if not orders and self._controller.at_rest:
            self._rest_left, self._resting = _REST_STEPS, size_of(len(stepped))
            self._latest = max(s.id for s in stepped)
        return orders

    def budget(self, stepping: list[Sequence], prompt_rows: int) -> dict[Sequence, int]:
        """Nodes to verify of each sequence that has a draft; see scheduler.Budget."""
        drafted = [(s, s.pending.draft) for s in stepping if s.pending and s.pending.draft is not None]
        self._drafted = None
        if not drafted:
            return {}
        sequences, drafts = [s for s, _ in drafted], [d for _, d in drafted]
        nodes = {s: len(d) for s, d in drafted}
        paths = Paths.of(drafts, [_samples(s) for s in sequences], [s.id for s in sequences])
        auto = np.array([s.request.speculation_mode is SpeculationMode.AUTO for s in sequences])
        asked = np.array([s.pending.max_nodes for s in sequences if s.pending])
        tokens = float(len(stepping))
        if not paths.lengths.any():
            self._drafted = _Drafted(sequences, paths, asked, auto, tokens)
            return nodes
        if not auto.all():
            gains = self._controller.calibration.gains(paths.probabilities, paths.cells)
            tokens += float(gains[~auto].sum())
        if auto.any():
            mine = paths.only(auto)
            rows = len(stepping) + prompt_rows + int(paths.lengths[~auto].sum())
            context = float(sum(s.committed for s in stepping))
            choice = self._controller.budget(mine, tokens, rows, len(stepping), context)
            tokens = float(choice.tokens[0])
            nodes |= zip((s for s, a in zip(sequences, auto, strict=True) if a), choice.nodes[0].tolist(), strict=True)
        self._drafted = _Drafted(sequences, paths, asked, auto, tokens)
        return nodes

    def observe(self, segments: list[Segment], verdicts: list[Verdict], seconds: float, cycle_seconds: float) -> None:
        """A step took so long, from planning to handing its tokens out, and so long since the step before it ended."""
        seen, self._drafted = self._drafted, None
        cycle, self._cycle = self._cycle, self._next_cycle
        if seen:
            self._learn(seen, segments, verdicts)
        drafted = seen if seen and seen.paths.lengths.any() else None
        if any(len(s.token_ids) > 1 for s in segments):
            return
        auto = [s for s in segments if s.sequence.request.speculation_mode is SpeculationMode.AUTO]
        if auto and self._drafting.pool:
            self._metrics.count_choice(self._present_mode.value, self._controller.order.reason.value)
        if cycle and cycle.unseen and not drafted:
            self._controller.pass_step(len(segments), seconds)
            return
        rows, context = sum(s.rows for s in segments), float(sum(s.start for s in segments))
        predicted = self._controller.steps.predict(rows, len(segments), context)
        self._controller.observe_step(rows, len(segments), context, seconds)
        emitted = sum(len(v.token_ids) for v in verdicts)
        if cycle and cycle.decoding:
            self._controller.observe_cycle(
                len(segments), cycle.decoding, context, emitted, cycle_seconds, cycle.drafted or drafted is not None
            )
        self._metrics.count_prediction(predicted, seconds, drafted.expected_tokens if drafted else emitted, emitted)
        for segment in auto if drafted else ():
            self._metrics.chosen_nodes.observe(segment.nodes)

    def observe_wait(self, used: list[PendingDraft], seconds: float) -> None:
        """A step waited so long for these drafts, which may have come or not."""
        nodes = round(sum(pending.max_nodes for pending in used) / len(used))
        self._controller.observe_wait(len(used), nodes, seconds, all(pending.primed for pending in used))

    def drafter_changed(self) -> None:
        """A drafter came."""
        self._rest_left = 0
        self._lessons = []
        self._controller.drafter_changed()

    def present(self) -> Present:
        """Safe from any thread; figures may be those of two successive steps."""
        controller = self._controller
        look, reason = controller.outlook, controller.order.reason.value
        return Present(
            mode=self._present_mode,
            nodes=controller.order.nodes,
            reason=reason if self._drafting.pool else "no drafter",
            gain=look.gain if look.plain_seconds else 0.0,
            expected_tokens=look.tokens,
            draft_seconds=look.draft_seconds,
            step_seconds=look.step_seconds,
            plain_step_seconds=look.plain_seconds,
            calibration=tuple(controller.calibration.per_depth()),
        )

    def _rests(self, stepped: list[Sequence]) -> bool:
        """Whether the next step goes by unseen: the last that was looked at was plain, and of the same kind."""
        if not self._rest_left:
            return False
        self._rest_left -= 1
        alike = all(s.request.speculation_mode is SpeculationMode.AUTO for s in stepped)
        known = not are_many(sum(s.id > self._latest for s in stepped), len(stepped))
        if alike and known and size_of(len(stepped)) == self._resting and self._drafting.pool:
            return True
        self._rest_left = 0
        return False

    @property
    def _present_mode(self) -> SpeculationMode:
        asks = self._controller.order.nodes > 0 and len(self._drafting.pool) > 0
        return SpeculationMode.TREE if asks else SpeculationMode.OFF

    def _load(self, asking: list[Sequence], stepped: list[Sequence], decoding: list[Sequence]) -> DecodeLoad:
        """All sequences that decode count, but for what is awaited: those of fixed modes only if they step along."""
        mode = SpeculationMode.AUTO
        others = [s for s in stepped if s.uncommitted == 1 and s.request.speculation_mode is not mode]
        fixed = [s for s in others if s.request.speculation_mode in _FIXED_SHAPES]
        auto = sum(s.request.speculation_mode is mode for s in decoding)
        sampled_ids = tuple(s.id for s in asking if _samples(s))
        return DecodeLoad(
            asking=len(asking),
            decoding=max(auto, len(asking)),
            context=sum(s.committed for s in asking) / len(asking),
            fixed=len(fixed),
            fixed_nodes=sum(self._limit(s) for s in fixed),
            undrafted=len(others) - len(fixed),
            sampled=len(sampled_ids),
            greedy_ids=tuple(s.id for s in asking if not _samples(s)),
            sampled_ids=sampled_ids,
        )

    def _limit(self, sequence: Sequence) -> int:
        block = sequence.request.speculation_mode is SpeculationMode.BLOCK
        most = self._drafting.block_nodes if block else sequence.request.max_draft_nodes
        return min(most, sequence.request.max_draft_nodes)

    def _learn(self, drafted: _Drafted, segments: list[Segment], verdicts: list[Verdict]) -> None:
        """What these drafts were worth, and what of them was accepted; later, if they are few."""
        found: Mapping[Sequence, tuple[Segment, Verdict]] = {
            s.sequence: (s, v) for s, v in zip(segments, verdicts, strict=True) if s.nodes
        }
        accepted: list[tuple[int, list[int]]] = []
        for sequence in drafted.sequences:
            if sequence not in found:
                accepted.append((0, []))
                continue
            segment, verdict = found[sequence]
            tokens = len(segment.token_ids)
            accepted.append((segment.nodes, [row - tokens for row in verdict.accepted_rows[tokens:]]))
        self._lessons.append(_Lesson(drafted, accepted))
        if self._controller.informed and sum(len(lesson.accepted) for lesson in self._lessons) < _LOOK_BACK:
            return
        lessons, self._lessons = self._lessons, []
        paths = Paths.joined([lesson.drafted.paths for lesson in lessons])
        asked = np.concatenate([lesson.drafted.asked for lesson in lessons])
        auto = np.concatenate([lesson.drafted.auto for lesson in lessons])
        self._controller.observe_drafts(paths, asked, auto)
        self._calibrate(paths, [of_one for lesson in lessons for of_one in lesson.accepted])

    def _calibrate(self, paths: Paths, outcomes: list[tuple[int, list[int]]]) -> None:
        """Compare what was accepted with what the drafts said, node by node."""
        verified, accepted = np.zeros((2, *paths.cells.shape), dtype=bool)
        for row, (nodes, indices) in enumerate(outcomes):
            verified[row, :nodes] = True
            accepted[row, indices] = True
        if verified.any():
            self._controller.observe_acceptance(paths, verified, accepted)
            self._metrics.count_mass(mass_by_depth(paths.probabilities[verified], paths.cells[verified])[1:])


def _samples(sequence: Sequence) -> bool:
    return not sequence.request.sampling.greedy
