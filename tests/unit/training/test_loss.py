"""The loss against its formula, slot by slot in plain Python."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

import draft_training.loss as loss_module
from draft_training.dataset import TrainingBatch
from draft_training.loss import LossWeights, TargetHead, block_loss
from draft_training.network import AnchorBatch

VOCAB, HIDDEN, BLOCK, EPS = 11, 4, 4, 1e-6


@dataclass
class FakeDflash2:
    selector_top_k: int


@dataclass
class FakeConfig:
    dflash2: FakeDflash2 | None


class FakeNetwork:
    """As much of a DraftNetwork as the loss reads: a selector that any formula will do for."""

    def __init__(self, top_k: int | None, head: TargetHead):
        self.config = FakeConfig(FakeDflash2(top_k) if top_k else None)
        self._head = head._head

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._head.T

    @staticmethod
    def candidate_selector(hidden: torch.Tensor, previous: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        return torch.sin(candidates * (previous[..., None] + 1.0)) * hidden.sum(dim=-1, keepdim=True)


def make(tokens: list[int] | None, seed: int = 0) -> tuple[TargetHead, torch.Tensor, TrainingBatch]:
    """Two conversations of two anchors; the second's last anchor fills up, and its first one's block is cut off."""
    g = torch.Generator().manual_seed(seed)
    rows = VOCAB if tokens is None else len(tokens)
    head = TargetHead(torch.rand(HIDDEN, generator=g) + 0.5, EPS, torch.randn(rows, HIDDEN, generator=g), tokens, VOCAB)
    hidden = torch.randn(2, 2, BLOCK - 1, HIDDEN, generator=g, requires_grad=True)
    ids = torch.randint(0, VOCAB, (2, 2, BLOCK), generator=g)
    valid = torch.ones(2, 2, BLOCK - 1, dtype=torch.bool)
    valid[1, 0, 1:] = False
    valid[1, 1] = False
    anchors = AnchorBatch(torch.zeros(2, 1, 1, HIDDEN), torch.zeros(2, 2, dtype=torch.int64), ids)
    target_hidden = torch.randn(2, 2, BLOCK - 1, HIDDEN, generator=g)
    return head, hidden, TrainingBatch(anchors, ids[:, :, 1:], valid, target_hidden)


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return [w / sum(weights) for w in weights]


def cross_entropy(scores: list[float], wanted: list[float]) -> float:
    return -sum(w * math.log(p) for w, p in zip(wanted, softmax(scores), strict=True))


def expected_loss(
    head: TargetHead,
    proposed: torch.Tensor,
    batch: TrainingBatch,
    weights: LossWeights,
    tokens: list[int] | None,
    top_k: int | None,
) -> tuple[float, float]:
    """The formula, one slot after another."""
    tokens = list(range(VOCAB)) if tokens is None else tokens
    norm, rows = head._norm.tolist(), head._head.tolist()
    total = weight_sum = 0.0
    for c, a, k in batch.valid.nonzero().tolist():
        hidden = batch.target_hidden[c, a, k].tolist()
        scale = (sum(h * h for h in hidden) / HIDDEN + EPS) ** -0.5
        normed = [h * scale * n for h, n in zip(hidden, norm, strict=True)]
        wanted = softmax([sum(x * w for x, w in zip(normed, row, strict=True)) for row in rows])
        label = int(batch.labels[c, a, k])
        if label in tokens:
            share = weights.distribution
            wanted = [share * p + (1 - share) * (t == label) for p, t in zip(wanted, tokens, strict=True)]
        states = proposed[c, a, k].tolist()
        logits = [sum(x * w for x, w in zip(states, row, strict=True)) for row in rows]
        loss = cross_entropy(logits, wanted)
        if top_k:
            best = sorted(range(len(tokens)), key=lambda i: -logits[i])[:top_k]
            if label in [tokens[i] for i in best]:
                mass = sum(wanted[i] for i in best)
                previous = int(batch.anchors.tokens[c, a, k])
                scores = [logits[i] + math.sin(tokens[i] * (previous + 1.0)) * sum(states) for i in best]
                loss += weights.selector * cross_entropy(scores, [wanted[i] / mass for i in best])
        weight = math.exp(-k / weights.decay)
        total, weight_sum = total + weight * loss, weight_sum + weight
    return total, weight_sum


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("tokens", [None, [0, 2, 3, 7, 8, 10]])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_loss_is_its_formula(share: float, tokens: list[int] | None, top_k: int | None) -> None:
    """Cross-entropy towards share x the target's distribution + (1 - share) x the token that came, weighted by
    exp(-(k - 1) / gamma). Where the head lacks that token the distribution alone counts; for DFlash2 the selector's
    loss is added where the token is a candidate."""
    weights = LossWeights(decay=2.0, distribution=share, selector=0.7)
    known = found = 0
    for seed in range(4):
        head, hidden, batch = make(tokens, seed)
        loss, weight = block_loss(FakeNetwork(top_k, head), hidden, batch, head, weights)  # type: ignore[arg-type]
        expected, expected_weight = expected_loss(head, hidden, batch, weights, tokens, top_k)
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
        assert float(weight) == pytest.approx(expected_weight, rel=1e-5)
        index = head.index(batch.labels[batch.valid])
        known += int((index >= 0).sum())
        found += int(((hidden @ head._head.T)[batch.valid].topk(3).indices == index[:, None]).any(dim=1).sum())
    slots = 4 * int(batch.valid.sum())
    assert 0 < found < slots
    assert known == slots if tokens is None else 0 < known < slots


@pytest.mark.parametrize("top_k", [None, 3])
def test_gradients_are_the_losss(top_k: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows are held at once: each slot's gradient is what the formula's difference quotient says."""
    monkeypatch.setattr(loss_module, "_ROWS", 2)
    weights = LossWeights(decay=2.0, distribution=0.3, selector=0.7)
    head, hidden, batch = make(None)
    block_loss(FakeNetwork(top_k, head), hidden, batch, head, weights)  # type: ignore[arg-type]
    assert hidden.grad is not None
    for place in batch.valid.nonzero().tolist():
        step = torch.zeros_like(hidden)
        step[(*place, 1)] = 1e-3
        sides = [
            expected_loss(head, (hidden + side * step).detach(), batch, weights, None, top_k)[0] for side in (1, -1)
        ]
        assert float(hidden.grad[(*place, 1)]) == pytest.approx((sides[0] - sides[1]) / 2e-3, rel=5e-3, abs=5e-4)


@pytest.mark.parametrize("top_k", [None, 3])
def test_only_valid_slots_teach(top_k: int | None) -> None:
    """Slots behind a conversation's end and anchors that fill up change neither loss nor gradient."""
    weights = LossWeights(decay=2.0, distribution=0.5, selector=1.0)
    head, hidden, batch = make(None)
    loss, _ = block_loss(FakeNetwork(top_k, head), hidden, batch, head, weights)  # type: ignore[arg-type]
    assert hidden.grad is not None
    assert not hidden.grad[~batch.valid].any()
    assert hidden.grad[batch.valid].abs().sum(dim=-1).min() > 0
    other = replace(
        batch,
        labels=torch.where(batch.valid, batch.labels, 5),
        target_hidden=torch.where(batch.valid[..., None], batch.target_hidden, 99.0),
    )
    again, _ = block_loss(FakeNetwork(top_k, head), hidden, other, head, weights)  # type: ignore[arg-type]
    assert torch.equal(loss, again)


def test_the_selector_learns_where_the_token_is_a_candidate() -> None:
    """A slot whose token is not among the candidates gives the selector nothing to learn; the others do."""
    grads = []
    head, hidden, batch = make(None)
    for selector in (0.0, 1.0):
        weights = LossWeights(decay=2.0, distribution=0.0, selector=selector)
        hidden.grad = None
        block_loss(FakeNetwork(3, head), hidden, batch, head, weights)  # type: ignore[arg-type]
        assert hidden.grad is not None
        grads.append(hidden.grad)
    moved = (grads[1] - grads[0]).abs().amax(dim=-1) > 1e-6
    missed = ((hidden @ head._head.T).topk(3).indices != batch.labels[..., None]).all(dim=-1)
    assert (missed & batch.valid).any()
    assert (moved == (~missed & batch.valid)).all()
