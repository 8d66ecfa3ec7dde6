"""Clients and a drafter in the engine's own thread, so that all steps of a scenario are of one kind. No torch here.

Texts are random and their continuations recorded at first; drafts then hold as many right tokens as the scenario says,
in a chain or at the front of a tree, and wrong ones for the rest.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tandem.draft_tree import Draft
from tandem.sampling import SamplingParams
from tandem.speculation import DraftRequest, DraftShape, DraftSource, Round, SequenceDraft, SpeculationMode
from verifier_service.drafters import Drafter
from verifier_service.drafting import DraftReply
from verifier_service.engine import Emission, Engine
from verifier_service.sequence import SequenceRequest
from verifier_service.step import Segment

SPINE = 7
"""Depth of a tree: its other nodes hang on this chain."""


@dataclass(frozen=True)
class Scenario:
    """Steps of one kind."""

    mode: SpeculationMode
    nodes: int
    """Verified per sequence and step."""
    clients: int
    context: int
    """Tokens of each prompt."""

    @property
    def rows(self) -> int:
        return self.clients * (1 + self.nodes)

    def is_of_kind(self, segments: Sequence[Segment]) -> bool:
        """Whether a step is what the scenario is about: all clients decode, with whole drafts."""
        return len(segments) == self.clients and all(len(s.token_ids) == 1 and s.nodes == self.nodes for s in segments)


class Driver:
    """Runs scenarios one after another, each `runs` times in turn; a first turn of all warms up."""

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        scenarios: Sequence[Scenario],
        runs: int,
        steps: int,
        accepted: int,
        source: DraftSource,
        begin: Callable[[Scenario | None], None],
    ):
        """steps: per request and scenario at least. accepted: right tokens of each draft. begin: told what is measured
        from now on; None: nothing."""
        self._engine = engine
        self._vocab_size = vocab_size
        self._begin = begin
        self._tokens = 2 + steps * (1 + accepted)
        """Emitted per request, or a few more: as many in every mode, so that the texts reach as far as any draft."""
        self._accepted = accepted
        self._turns = self._in_turn(scenarios, runs)
        self._drafter = Drafter("profile", self._draft, source)
        self._texts: dict[int, list[int]] = {}
        """By prompt: its tokens and what follows them, as far as known."""
        self._prompt_of: dict[int, int] = {}
        """By sequence id, which count up from 1."""
        self._running = 0

    def run(self) -> None:
        """All scenarios, in the thread that calls."""
        self._engine.attach(self._drafter)
        self._next()
        self._engine.run()

    def _in_turn(self, scenarios: Sequence[Scenario], runs: int) -> Iterator[tuple[Scenario, bool]]:
        yield from ((s, False) for s in scenarios)
        for run in range(runs):
            first = run % len(scenarios)
            yield from ((s, True) for s in [*scenarios[first:], *scenarios[:first]])

    def _next(self) -> None:
        scenario, measured = next(self._turns, (None, False))
        self._begin(scenario if measured else None)
        if scenario is None:
            self._engine.stop()
            return
        self._running = scenario.clients
        for number in range(scenario.clients):
            text = self._text(number, scenario.context)
            self._prompt_of[len(self._prompt_of) + 1] = number
            request = SequenceRequest(
                request_id=str(len(self._prompt_of)),
                token_ids=text[: scenario.context],
                prompt_length=scenario.context,
                sampling=SamplingParams(temperature=0.0),
                # A draft is never cut because the end is near.
                max_tokens=self._tokens + 2 * scenario.nodes,
                speculation_mode=scenario.mode,
                max_draft_nodes=max(1, scenario.nodes),
            )
            self._engine.submit(request, self._take)

    def _text(self, number: int, context: int) -> list[int]:
        rng = random.Random(number)
        return self._texts.setdefault(number, [rng.randrange(self._vocab_size) for _ in range(context)])

    def _take(self, emission: Emission) -> None:
        if emission.error:
            raise emission.error
        sequence = emission.sequence
        text = self._texts[self._prompt_of[sequence.id]]
        text += sequence.tokens[len(text) :]
        if sequence.emitted >= self._tokens and not emission.finish_reason:
            self._engine.abort(sequence.request.request_id)
        if emission.finish_reason:
            self._running -= 1
            if not self._running:
                self._next()

    def _draft(self, work: Round) -> None:
        if work.requests:
            self._engine.deliver(self._drafter, DraftReply([self._answer(request) for request in work.requests], 0))

    def _answer(self, request: DraftRequest) -> SequenceDraft:
        text = self._texts[self._prompt_of[request.sequence_id]]
        follows = text[request.base_position + 1 :][: request.max_nodes]
        right = follows[: self._accepted]
        wrong = [(token + 1) % self._vocab_size for token in follows[len(right) :]]
        # Behind the end of what is known any token will do.
        chain = [*right, *wrong, *[0] * (request.max_nodes - len(follows))]
        draft = self._tree(chain) if request.shape is DraftShape.TREE else Draft.block(chain, [-0.1] * len(chain))
        return SequenceDraft(request.sequence_id, request.epoch, request.base_position, draft)

    def _tree(self, chain: list[int]) -> Draft:
        """The front of the chain, and behind it further children of its root and nodes in turn."""
        spine, more = chain[:SPINE], len(chain[SPINE:])
        # No two children of a node have the same token.
        others = [(spine[i % SPINE] + 2 + i) % self._vocab_size for i in range(more)]
        parents = [*range(len(spine)), *(i % SPINE for i in range(more))]
        return Draft(spine + others, parents, [-0.1 * (1 + i) for i in range(len(chain))])
