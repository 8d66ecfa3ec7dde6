"""Decides whether to ask for drafts, and how much of them to verify. Knows numbers only: no sequences, no clock."""

import logging
import math
from collections import Counter, deque
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from verifier_service.speculation.account import LossAccount
from verifier_service.speculation.choice import Choice, best_counts, choose
from verifier_service.speculation.costs import DraftCosts, StepCosts
from verifier_service.speculation.paths import Calibration, DraftMemory, Paths

logger = logging.getLogger(__name__)

PROBE_SHARE, HOPEFUL_PROBE_SHARE = 0.005, 0.01
"""Of the time that probes may cost; where drafts may well pay, staying off may cost more than finding out."""
PROBE_STEPS = 2
"""Steps of one probe: one measurement may be an outlier."""
_PROBE_PAUSE = 48
"""Steps between probes at least, and of a load that may not last before one."""
_LONGEST_PAUSE = 20.0
"""Seconds of steps. The pause before a probe for drafts doubles with each in vain at such a load, up to this."""
_MOST_PROBE_CYCLES = 4
"""Drafted cycles that a probe may be said to have cost: more was something else."""
_LEAST_LOSS = 0.05
"""Of a probe's time that is thought lost at least."""
_TURN_ON, _TURN_OFF = 1.015, 0.96
"""Gains over plain decoding from which drafts are asked for again, and below which no more. Between the two what is
found out (the account) is better than what is estimated."""
_REVIEW_STEPS, _MOST_REVIEW_STEPS = 8, 64
"""Steps after which the decision to ask is taken anew; more and more while nothing changes."""
_REVIEW_PAUSE = 4
"""Steps between two such decisions at least, however the load changes."""
_LEARN_DRAFTS = 96
"""Drafts to see before it is decided against drafts, of greedy and of sampled sequences if both are there."""
_LEARN_NODES = 3
"""Nodes of each that are verified until then at least: what is not verified teaches nothing."""
_MORE_EVERY = 8
"""Steps of which one asks for more nodes than are thought worth it: what is never asked for is not known, and texts
change."""
_SETTLED_STEPS = 8
"""The load that is decided for is the highest of so many steps: a sequence that ended is soon replaced where there
is a load, and the steps until then tell nothing of others."""
_SAMPLE = 32
"""Drafts that stand for the next ones at least."""


def size_of(sequences: int) -> int:
    """Numbers of sequences that are alike have the same: those within a factor of the square root of 2 or so."""
    return round(2 * math.log2(sequences))


def are_many(new: int, sequences: int) -> bool:
    """Whether so many new ones among these sequences, whose texts may be of another kind, ask for a look."""
    return 4 * new >= sequences


class Reason(Enum):
    """Why a step asked for drafts or did not."""

    LEARNING = "learning"
    PAYS = "pays"
    NO_GAIN = "no gain"
    LOST = "lost lately"
    PROBING_DRAFTS = "probing drafts"
    PROBING_PLAIN = "probing plain steps"


class Asked(Enum):
    """Which sequences' drafters are asked, or at least sent context."""

    NONE = "none"
    ONE = "one"
    """The one that costs least to ask for."""
    ALL = "all"


@dataclass(frozen=True)
class DecodeLoad:
    """What decodes at this moment. Sequences in a fixed mode are not the controller's, but share its steps."""

    asking: int
    """Sequences in auto mode that just stepped and could be drafted for."""
    decoding: int
    """All sequences in auto mode that decode; those whose drafts are on their way too."""
    context: float
    """Tokens of KV per sequence."""
    fixed: int = 0
    """Sequences that are drafted for in any case."""
    fixed_nodes: int = 0
    """Nodes of all of those together."""
    undrafted: int = 0
    """Sequences that decode plainly in any case."""
    sampled: int = 0
    """Of `asking`, those that sample: their drafts are accepted less often."""
    greedy_ids: tuple[int, ...] = ()
    sampled_ids: tuple[int, ...] = ()
    """Which sequences ask now; what their own drafts were worth says most of their next ones."""


@dataclass(frozen=True)
class Order:
    """What to ask for now."""

    asked: Asked
    nodes: int
    """Per sequence; 0 sends context only: the draft asked for a step later does not wait for what was missed then."""
    reason: Reason


@dataclass(frozen=True)
class Outlook:
    """What speculating is thought to bring at a load."""

    nodes: int
    """To ask for, per sequence."""
    gain: float
    """Tokens per second over plain decoding's; inf before there is anything to tell from."""
    optimistic_gain: float
    """The same if drafts and steps cost as little and bring as much as is still possible."""
    tokens: float
    """Expected per sequence and step."""
    step_seconds: float
    """Of a step that verifies, waiting not included."""
    draft_seconds: float
    """Waited for drafts per step."""
    plain_seconds: float
    """Of a plain step."""


class SpeculationController:
    """The two decisions and what they learn from."""

    def __init__(self, steps: StepCosts, max_nodes: int):
        """max_nodes: nodes of a draft at most."""
        self.steps = steps
        self.drafts = DraftCosts()
        self._account = LossAccount()
        self.speculating = True
        """Whether drafts are asked for, probes apart. At first they are, to learn what they bring."""
        self.order = Order(Asked.NONE, 0, Reason.LEARNING)
        """The last."""
        self.supplied = Asked.ALL
        """Whose drafters hold what was committed up to the last step."""
        self._max_nodes = max_nodes
        self._forget_drafts()
        self._loads: deque[DecodeLoad] = deque(maxlen=_SETTLED_STEPS)
        self._load = DecodeLoad(0, 0, 0.0)
        """What is decided for."""
        self._reviewed_for: tuple[int, ...] = ()
        self._reviewed_ids: frozenset[int] = frozenset()
        self._lasting = (0, 0)
        """Size of the load and the step since which it is, within a factor of two or so."""
        self._until_review = 0
        self._review_every = _REVIEW_STEPS
        self._busy = 0.0
        """Seconds of steps and waits so far."""
        self._steps = 0
        self._plain_seen = (0.0, 0)
        """(busy seconds, steps) when a step of all sequences last went without drafts."""
        self._drafts_seen = (0.0, 0)
        """The same for a step with drafts."""
        self._probe: Order | None = None
        self._probe_left = 0
        self._probe_began: tuple[float, int] | None = None
        """(busy seconds, steps) when the probe for drafts under way, or just over, began."""
        self._probe_cost = 0.0
        """What the last one cost in all, with what had to be sent for it."""
        self._in_vain: Counter[int] = Counter()
        """Probes for drafts at loads of a size since it speculated there last."""

    def drafter_changed(self) -> None:
        """A drafter came: how fast it is is not known."""
        self.drafts.forget()
        self._forget_drafts()
        self._account = LossAccount()
        self._probe_began, self._probe_cost = None, 0.0
        self._in_vain.clear()
        self._turn(True)
        self._until_review = 0

    def plan(self, load: DecodeLoad) -> Order:
        """Whether to ask for drafts now, and of how many nodes. Called once per step while auto sequences decode."""
        self._until_review -= 1
        load = self._load = self._settled(load)
        if abs(size_of(load.decoding) - self._lasting[0]) > 1:
            self._lasting = size_of(load.decoding), self._steps
        share = round(4 * load.sampled / load.asking)
        bucket = (size_of(load.asking), size_of(load.decoding), load.fixed, share)
        ids = load.greedy_ids + load.sampled_ids
        new_texts = are_many(sum(id not in self._reviewed_ids for id in ids), load.asking)
        moved = bucket != self._reviewed_for or new_texts
        if self._until_review <= 0 or (moved and self._until_review <= self._review_every - _REVIEW_PAUSE):
            self._review(load, bucket, new_texts)
        if self._probe_left == 0:
            self._settle_probe()
            self._probe = self._due_probe(load)
            if self._probe:
                self._probe_left = PROBE_STEPS
                if self._probe.reason is Reason.PROBING_DRAFTS:
                    self._probe_began = self._busy, self._steps
        if not self.informed:
            # Plain steps among them, which all gains are compared with.
            plain = self._steps % 3 == 2
            order = Order(Asked.NONE if plain else Asked.ALL, 0 if plain else self.outlook.nodes, Reason.LEARNING)
        elif self._probe:
            order = self._probe
        elif self.speculating:
            nodes = self.outlook.nodes
            if self._steps % _MORE_EVERY == 0:
                nodes = next((count for count in _node_counts(self._max_nodes) if count > nodes), nodes)
            order = Order(Asked.ALL, nodes, Reason.PAYS)
        else:
            order = Order(Asked.NONE, 0, Reason.NO_GAIN if self._account.open else Reason.LOST)
        resumes = self.speculating or order.reason is Reason.LEARNING
        supplied = Asked.ALL if resumes and order.asked is Asked.NONE else order.asked
        if supplied not in (Asked.NONE, self.supplied):
            order = replace(order, nodes=0)
        elif self._probe_left:
            self._probe_left -= 1
            if self._probe_left == 0:
                self._until_review = 0
        self.supplied = supplied
        if order != self.order:
            logger.debug("%s", self._explain(order, load))
            self.order = order
        return order

    def _forget_drafts(self) -> None:
        """What drafts are worth is not known."""
        self.calibration = Calibration()
        self._memories = (DraftMemory(self._max_nodes), DraftMemory(self._max_nodes))
        """Drafts of greedy sequences, and of those that sample."""
        self.outlook = Outlook(self._max_nodes, math.inf, math.inf, 1.0, 0.0, 0.0, 0.0)

    def _settle_probe(self) -> None:
        """What a probe for drafts cost is known when its last step is over."""
        if self._probe_began is None:
            return
        busy, steps = self._busy - self._probe_began[0], self._steps - self._probe_began[1]
        look = self.outlook
        gained = PROBE_STEPS * (look.tokens - 1) if self._probe and self._probe.asked is Asked.ALL else 0.0
        most = _MOST_PROBE_CYCLES * (look.draft_seconds + look.step_seconds)
        self._probe_cost = min(most, max(0.0, busy - (steps + gained) * look.plain_seconds))
        self._probe_began = None
        if not self.speculating:
            self._in_vain[size_of(self._load.decoding)] += 1

    def _settled(self, load: DecodeLoad) -> DecodeLoad:
        self._loads.append(load)
        asking, decoding = (max(getattr(past, name) for past in self._loads) for name in ("asking", "decoding"))
        return replace(load, asking=asking, decoding=decoding, sampled=round(load.sampled * asking / load.asking))

    def budget(self, paths: Paths, tokens: float, rows: int, sequences: int, context_tokens: float) -> Choice:
        """How many nodes of each of these drafts to verify in a step that has `rows` rows, `sequences` sequences and
        `tokens` expected tokens without them."""
        whose = zip(paths.sampled.tolist(), paths.sequences.tolist(), strict=True)
        trust = np.array([self._memories[sampled].trust(sequence) for sampled, sequence in whose])
        gains = self.calibration.gains(paths.probabilities, paths.cells, trust)[None]
        drafts, width = gains.shape[1:]
        seconds = self.steps.predict_up_to(rows, drafts * width, sequences, context_tokens, optimistic=True)
        if self.order.asked is Asked.ONE:
            # Asked for to learn from, and paid for as a whole.
            return _whole(gains, paths.lengths, tokens, seconds)
        if not self.informed:
            choice = choose(gains, tokens, seconds, 0.0, 0.0)
            least = np.maximum(choice.nodes[0], np.minimum(_LEARN_NODES, paths.lengths))
            return _whole(gains, least, tokens, seconds)
        # What drafting costs in general, not what it cost this time: that is past, and says nothing of the next.
        waited = self.drafts.predict(drafts, max(1, self.order.nodes), self.steps.drift)
        plain_rate = sequences / self.steps.predict(sequences, sequences, context_tokens)
        return choose(gains, tokens, seconds, waited, plain_rate)

    def observe_drafts(self, paths: Paths, asked: np.ndarray, auto: np.ndarray) -> None:
        """Drafts that arrived, what they were asked for, and which of them are of auto sequences (bool)."""
        for sampled, memory in enumerate(self._memories):
            mine = auto & (paths.sampled == sampled)
            if mine.any():
                memory.add(paths.only(mine), asked[mine])

    def observe_acceptance(self, paths: Paths, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Which nodes of drafts were verified and which of those accepted: [drafts, nodes] bool each."""
        used = verified.any(axis=1)
        expected = (self.calibration.gains(paths.probabilities, paths.cells) * verified).sum(axis=1)
        found = accepted.sum(axis=1)
        for row in np.flatnonzero(used).tolist():
            memory = self._memories[int(paths.sampled[row])]
            memory.settle(int(paths.sequences[row]), float(expected[row]), int(found[row]))
        sampled = int((used & paths.sampled).sum())
        nodes = paths.probabilities[verified], paths.cells[verified], accepted[verified]
        self.calibration.observe(*nodes, int(used.sum()) - sampled, sampled)

    def observe_step(self, rows: int, sequences: int, context_tokens: float, seconds: float) -> None:
        """A step without prefill took so long, waits not included."""
        self._count(seconds, plain=rows == sequences)
        self.steps.observe(rows, sequences, context_tokens, seconds)

    @property
    def at_rest(self) -> bool:
        """Whether the next steps will be plain ones as the last, as far as one can say. A load that may have fallen is
        looked at until it has settled."""
        if self.order.reason not in (Reason.NO_GAIN, Reason.LOST):
            return False
        return size_of(self._loads[-1].decoding) == size_of(self._load.decoding)

    def pass_step(self, sequences: int, seconds: float) -> None:
        """A plain step that nobody looked at took so long."""
        self._count(seconds, plain=True)
        self._until_review -= 1
        if self.informed:
            self._account.pass_time(1.0, sequences)

    def observe_cycle(
        self, sequences: int, decoding: int, context_tokens: float, emitted: int, seconds: float, drafted: bool
    ) -> None:
        """From the end of one step to the end of the next, one of `sequences` sequences and without prefill, it took so
        long, whatever was done in it. decoding: sequences that a plain step would have had; drafted: whether drafts
        were asked for or drafters sent what they need."""
        if not self.informed:
            return
        plain = self.steps.predict(decoding, decoding, context_tokens / sequences * decoding)
        self._account.pass_time(seconds / plain, decoding)
        if drafted:
            self._account.settle(emitted / decoding, seconds / plain, decoding)
        if not self._account.open:
            self._turn(False)

    def observe_wait(self, sequences: int, nodes: int, seconds: float, measured: bool) -> None:
        """The next step waits, or waited, so long for the drafts of these sequences. Not measured: the drafters were
        sent more than what one step commits, which takes longer."""
        self._busy += seconds
        age = max(1, self._steps - self._drafts_seen[1])
        self._drafts_seen = self._busy, self._steps
        if measured:
            self.drafts.observe(sequences, nodes, seconds, self.steps.drift, age)
            if self.drafts.surprised:
                self._until_review = 0
                # A probe goes on until its surprise is either believed or contradicted.
                if self._probe and self._probe.reason is Reason.PROBING_DRAFTS:
                    self._probe_left = max(1, self._probe_left)

    def _count(self, seconds: float, plain: bool) -> None:
        self._steps += 1
        self._busy += seconds
        if plain:
            self._plain_seen = self._busy, self._steps

    @property
    def informed(self) -> bool:
        """Whether there is enough to decide against drafts."""
        return self.drafts.known and all(self._memories[s].count >= _LEARN_DRAFTS for s in self._sorts)

    @property
    def _sorts(self) -> list[bool]:
        """Whether the load's sequences sample: False, True, or both if there are enough of each to matter."""
        sampled, all_of_them = self._load.sampled, self._load.asking
        return [s for s, count in ((False, all_of_them - sampled), (True, sampled)) if 4 * count >= all_of_them]

    def _likely_gains(self, groups: int, load: DecodeLoad) -> np.ndarray:
        """[groups, load.asking, nodes]: gains of drafts that stand for the next ones of these sequences, drafts of such
        as the load's if there are any."""
        sorts = (load.asking - load.sampled, load.greedy_ids), (load.sampled, load.sampled_ids)
        found = []
        for sampled, (count, ids) in enumerate(sorts):
            like, other = self._memories[sampled], self._memories[1 - sampled]
            memory = like if like.count else other
            if count:
                found.append(memory.gains(memory.stand_ins(groups, count, ids), self.calibration))
        return np.concatenate(found, axis=1)

    def _review(self, load: DecodeLoad, bucket: tuple[int, ...], new_texts: bool) -> None:
        if not self.drafts.known or not any(memory.count for memory in self._memories):
            return
        before = self._stance
        self.outlook, self._reviewed_for = self._look_ahead(load), bucket
        self._reviewed_ids = frozenset(load.greedy_ids + load.sampled_ids)
        if self.informed:
            self._turn(self._account.open and self.outlook.gain > (_TURN_OFF if self.speculating else _TURN_ON))
            if self.speculating:
                del self._in_vain[size_of(load.decoding)]
        if not self.informed:
            self._review_every = _REVIEW_PAUSE
        elif before == self._stance and not (new_texts and self.speculating):
            self._review_every = min(2 * self._review_every, _MOST_REVIEW_STEPS)
        else:
            self._review_every = _REVIEW_STEPS
        self._until_review = self._review_every

    @property
    def _stance(self) -> tuple[int, tuple[int, ...]]:
        """What a review may change: nodes, 0 where no drafts are asked for, and for which load."""
        return self.outlook.nodes if self.speculating else 0, self._reviewed_for

    def _turn(self, on: bool) -> None:
        if on != self.speculating:
            self.speculating = on
            self._probe, self._probe_left = None, 0

    def _look_ahead(self, load: DecodeLoad) -> Outlook:
        """Choose nodes for steps of recent drafts, for each number of nodes that could be asked for."""
        n, others = load.asking, load.fixed + load.undrafted
        drift = self.steps.drift
        rows = n + others + load.fixed_nodes
        tokens = n + others
        plain_sequences = load.decoding + others
        plain_rows, plain_context = plain_sequences + load.fixed_nodes, plain_sequences * load.context
        plain_seconds = self.steps.predict(plain_rows, plain_sequences, plain_context)
        if load.fixed:
            fixed_nodes = max(1, load.fixed_nodes // load.fixed)
            plain_seconds += self.drafts.predict(load.fixed, fixed_nodes, drift)
        plain_rate = plain_sequences / plain_seconds
        groups = max(1, -(-_SAMPLE // n))
        steps = rows, n * self._max_nodes, n + others, (n + others) * load.context
        thought, hoped = self.steps.predict_up_to(*steps), self.steps.predict_up_to(*steps, optimistic=True)
        deviation = self.calibration.deviation(False in self._sorts, True in self._sorts)
        gains = self._likely_gains(groups, load)
        best: Outlook | None = None
        for nodes in _node_counts(self._max_nodes):
            waited = self.drafts.predict(n + load.fixed, nodes, drift)
            choice = best_counts(gains[:, :, :nodes], tokens, hoped[: 1 + n * nodes], waited, plain_rate)
            emitted, stepped = float(choice.tokens.mean()), float(thought[choice.counts].mean())
            hoped_tokens = emitted + deviation * (emitted - tokens)
            lucky = self.drafts.optimistic(n + load.fixed, nodes, drift)
            outlook = Outlook(
                nodes=nodes,
                gain=emitted / (waited + stepped) / plain_rate,
                optimistic_gain=hoped_tokens / (lucky + float(choice.seconds.mean())) / plain_rate,
                tokens=emitted / tokens,
                step_seconds=stepped,
                draft_seconds=waited,
                plain_seconds=plain_seconds,
            )
            if best is None or outlook.gain > best.gain:
                best = outlook
        assert best
        return best

    def _due_probe(self, load: DecodeLoad) -> Order | None:
        """A few steps the other way, where they may cost what their share of the time since the last allows."""
        if not self.informed or not self._account.open:
            return None
        seen, steps = self._plain_seen if self.speculating else self._drafts_seen
        if self._steps - max(steps, self._lasting[1]) < _PROBE_PAUSE:
            return None
        paused = self._busy - seen
        if self.speculating:
            look = self.outlook
            cost = PROBE_STEPS * look.plain_seconds * (1 - 1 / max(1.0, look.gain))
            return Order(Asked.NONE, 0, Reason.PROBING_PLAIN) if paused >= cost / PROBE_SHARE else None
        order, pause = self._probe_for_drafts(load)
        pause = max(pause, min(pause * 2 ** self._in_vain[size_of(load.decoding)], _LONGEST_PAUSE))
        return order if paused >= pause else None

    def _probe_for_drafts(self, load: DecodeLoad) -> tuple[Order, float]:
        """What to ask for, and the seconds without drafts that pay for it."""
        look, n = self.outlook, load.decoding
        if look.optimistic_gain > _TURN_ON:
            lost = max(_LEAST_LOSS, 1 - look.gain)
            cost = PROBE_STEPS * (look.draft_seconds + look.step_seconds) * lost
            asked, share = Asked.ALL, HOPEFUL_PROBE_SHARE
        else:
            longer = self.steps.predict_up_to(n, look.nodes, n, n * load.context)
            waited = self.drafts.predict(1, look.nodes, self.steps.drift)
            cost = PROBE_STEPS * (waited + float(longer[-1] - longer[0]))
            asked, share = Asked.ONE, PROBE_SHARE
        return Order(asked, look.nodes, Reason.PROBING_DRAFTS), max(self._probe_cost, cost) / share

    def _explain(self, order: Order, load: DecodeLoad) -> str:
        look = self.outlook
        return (
            f"speculation: ask {order.asked.value} of {load.asking} sequences for {order.nodes} nodes, "
            f"{order.reason.value}; gain {look.gain:.3f}: {look.tokens:.2f} tokens each in "
            f"{look.draft_seconds * 1e3:.1f} + {look.step_seconds * 1e3:.1f} ms, plain 1 in "
            f"{look.plain_seconds * 1e3:.1f} ms"
        )


def _whole(gains: np.ndarray, nodes: np.ndarray, tokens: float, seconds: np.ndarray) -> Choice:
    """These numbers of nodes, for the one group of gains."""
    added = gains[0][np.arange(gains.shape[2]) < nodes[:, None]].sum()
    return Choice(nodes[None], np.array([tokens + added]), seconds[[int(nodes.sum())]])


def _node_counts(most: int) -> list[int]:
    """Numbers of nodes that are considered: 1, 2, 3, 4, 6, 8, 12, ... and `most`."""
    counts = {2**i for i in range(8)} | {3 * 2**i for i in range(7)}
    return sorted({c for c in counts if c < most} | {most})
