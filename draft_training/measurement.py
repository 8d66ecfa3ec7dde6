"""Acceptance lengths by prompt kind and draft budget, of a draft model and of the n-gram drafter beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from draft_training.acceptance import Acceptance, Answer, DraftBudget, NgramSource, Source, measure
from tandem.speculation import DraftShape

ALL = "all"


@dataclass(frozen=True)
class Measured:
    """One source with one budget."""

    source: str
    """"draft model" or "n-gram"."""
    budget: str
    """"block of 8", "tree of 32"."""
    by_group: dict[str, Acceptance]
    """Acceptance by kind, and of all together under ALL."""


def budgets(block_size: int, trees: Sequence[int]) -> dict[str, DraftBudget]:
    """Names and budgets: the draft model's block, and trees of these many nodes."""
    named = {f"block of {block_size}": DraftBudget(DraftShape.BLOCK, block_size - 1)}
    return named | {f"tree of {nodes}": DraftBudget(DraftShape.TREE, nodes) for nodes in trees}


def measure_sources(
    sources: dict[str, Source], answers: Sequence[Answer], block_size: int, trees: Sequence[int]
) -> list[Measured]:
    """Every source with every budget."""
    results = []
    for name, source in sources.items():
        for budget_name, budget in budgets(block_size, trees).items():
            by_group = measure(source, answers, budget)
            total = Acceptance()
            for part in by_group.values():
                total.add(part)
            results.append(Measured(name, budget_name, {**dict(sorted(by_group.items())), ALL: total}))
    return results


def with_ngram(draft_model: Source) -> dict[str, Source]:
    """The draft model, and the n-gram drafter as the baseline that any draft model has to beat."""
    return {"draft model": draft_model, "n-gram": NgramSource()}


def table(measured: Sequence[Measured], groups: Sequence[str]) -> list[list[str]]:
    """Rows of text: a head, then one per source and budget."""
    rows = [["source", "budget", *groups]]
    for entry in measured:
        rows.append([entry.source, entry.budget, *(f"{entry.by_group[g].length:.2f}" for g in groups)])
    return rows
