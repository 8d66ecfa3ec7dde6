"""Contenders side by side, one request at a time: figures and their tables; pure arithmetic.

Contenders take turns within every run, in an order that rotates, so that a machine that gets faster or slower favours
none; ratios are taken within a run. Two speeds:
- whole: tokens over the time of whole requests, prompt included.
- decode: tokens behind an answer's first message over the time from that message to the answer's end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import median
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Answer:
    """One finished request."""

    token_ids: tuple[int, ...]
    seconds: float
    first_seconds: float
    """Until the first tokens were there."""
    first_tokens: int
    """How many came first: 1 where tokens come one by one."""


@dataclass(frozen=True)
class Turn:
    """One contender over all prompts, in one run."""

    contender: str
    run: int
    """From 1 on."""
    answers: tuple[Answer, ...]

    @property
    def whole(self) -> float:
        """Tokens per second."""
        return sum(len(a.token_ids) for a in self.answers) / sum(a.seconds for a in self.answers)

    @property
    def decode(self) -> float | None:
        """Tokens per second; None if no answer went on behind its first message."""
        seconds = sum(a.seconds - a.first_seconds for a in self.answers)
        tokens = sum(len(a.token_ids) - a.first_tokens for a in self.answers)
        return tokens / seconds if tokens else None


@dataclass(frozen=True)
class Standing:
    """One contender over all runs: medians, with what each run gave."""

    contender: str
    tokens_per_second: float
    tokens_per_second_of_runs: list[float]
    decode_tokens_per_second: float | None
    decode_tokens_per_second_of_runs: list[float]
    equal_answers: int
    """Answers with the same ids as the first contender's, in the last run."""
    prefix_agreement: float
    """Mean share of the first contender's ids, from the front, that this one's answers share."""


@dataclass(frozen=True)
class Ratio:
    """One of ours by a peer, pair by pair within runs."""

    ours: str
    peer: str
    whole: float
    whole_of_runs: list[float]
    decode: float | None
    decode_of_runs: list[float]


def order(contenders: Sequence[str], run: int) -> list[str]:
    """Who comes when in a run."""
    first = run % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def standings(turns: Sequence[Turn]) -> list[Standing]:
    """turns: in order of the contenders, of which the first is what answers are compared with."""
    by_name = _by_name(turns)
    reference = next(iter(by_name.values()))[-1].answers
    found = []
    for name, mine in by_name.items():
        decode = [turn.decode for turn in mine if turn.decode is not None]
        pairs = list(zip(reference, mine[-1].answers, strict=True))
        found.append(
            Standing(
                contender=name,
                tokens_per_second=median(turn.whole for turn in mine),
                tokens_per_second_of_runs=[turn.whole for turn in mine],
                decode_tokens_per_second=median(decode) if decode else None,
                decode_tokens_per_second_of_runs=decode,
                equal_answers=sum(a.token_ids == b.token_ids for a, b in pairs),
                prefix_agreement=sum(_agreement(a.token_ids, b.token_ids) for a, b in pairs) / len(pairs),
            )
        )
    return found


def ratios(turns: Sequence[Turn], ours: Sequence[str]) -> list[Ratio]:
    """Each of ours by each peer."""
    by_name = _by_name(turns)
    found = []
    for name in ours:
        for peer in (p for p in by_name if p not in ours):
            pairs = list(zip(by_name[name], by_name[peer], strict=True))
            assert all(a.run == b.run for a, b in pairs)
            whole = [a.whole / b.whole for a, b in pairs]
            decode = [a.decode / b.decode for a, b in pairs if a.decode and b.decode]
            found.append(Ratio(name, peer, median(whole), whole, median(decode) if decode else None, decode))
    return found


def tables(turns: Sequence[Turn], ours: Sequence[str]) -> Iterator[Table]:
    """Speeds of all, then ours by the peers'."""
    speeds = _grid("greedy, one request at a time; medians of the runs with their range, tokens/s")
    for heading in ("decode", "whole requests", "equal answers", "prefix agreement"):
        speeds.add_column(heading, justify="right")
    requests = len(turns[0].answers)
    for s in standings(turns):
        decode = _range(s.decode_tokens_per_second, s.decode_tokens_per_second_of_runs, 1)
        whole = _range(s.tokens_per_second, s.tokens_per_second_of_runs, 1)
        speeds.add_row(s.contender, decode, whole, f"{s.equal_answers} of {requests}", f"{s.prefix_agreement:.0%}")
    yield speeds
    quotients = _grid("by peer, pair by pair within runs")
    for heading in ("by", "decode", "whole requests"):
        quotients.add_column(heading, justify="left" if heading == "by" else "right")
    for r in ratios(turns, ours):
        decode, whole = _range(r.decode, r.decode_of_runs, 2), _range(r.whole, r.whole_of_runs, 2)
        quotients.add_row(r.ours, r.peer, decode, whole)
    yield quotients


def as_json(turns: Sequence[Turn], ours: Sequence[str]) -> dict[str, Any]:
    """Figures, and every answer's times."""
    return {
        "results": [asdict(s) for s in standings(turns)],
        "ratios": [asdict(r) for r in ratios(turns, ours)],
        "turns": [asdict(turn) for turn in turns],
    }


def _by_name(turns: Sequence[Turn]) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = {}
    for turn in turns:
        found.setdefault(turn.contender, []).append(turn)
    return found


def _agreement(reference: tuple[int, ...], other: tuple[int, ...]) -> float:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reference, other, strict=False)))
    return same / len(reference) if reference else 1.0


def _grid(title: str) -> Table:
    grid = Table(title=title, title_justify="left")
    grid.add_column("contender")
    return grid


def _range(value: float | None, runs: Sequence[float], digits: int) -> str:
    if value is None:
        return "-"
    spread = f" ({min(runs):.{digits}f}-{max(runs):.{digits}f})" if len(runs) > 1 else ""
    return f"{value:.{digits}f}{spread}"
