"""What a draft model is trained towards: the tokens that came, and the target's own distribution at each of them."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from draft_training.dataset import TrainingBatch
from draft_training.network import DraftNetwork

_ROWS = 128
"""Slots whose logits are held at once."""


@dataclass(frozen=True)
class LossWeights:
    """How terms and positions count."""

    decay: float
    """gamma: the k-th slot behind the anchor weighs exp(-(k - 1) / gamma) (DFlash, arXiv 2602.06036)."""
    distribution: float
    """Share of the target's distribution against the token that came, 0 to 1."""
    selector: float
    """Weight of DFlash2's candidate selector."""


class TargetHead:
    """The target's last norm and head, restricted to the tokens the draft model proposes."""

    def __init__(self, norm: torch.Tensor, eps: float, head: torch.Tensor, tokens: list[int] | None, vocab_size: int):
        """norm [hidden_size]; head [head rows, hidden_size]; tokens: what each head row stands for, None for all."""
        self._norm, self._eps, self._head = norm, eps, head
        self.tokens = torch.arange(vocab_size) if tokens is None else torch.tensor(tokens)
        self._index = torch.full((vocab_size,), -1)
        self._index[self.tokens] = torch.arange(len(self.tokens))
        self.tokens, self._index = self.tokens.to(head.device), self._index.to(head.device)

    def probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, head rows], renormalised over these tokens."""
        return F.linear(F.rms_norm(hidden, self._norm.shape, self._norm, self._eps), self._head).softmax(dim=-1)

    def index(self, tokens: torch.Tensor) -> torch.Tensor:
        """Head row of each token, -1 where it has none."""
        return self._index[tokens]


def block_loss(
    network: DraftNetwork, hidden: torch.Tensor, batch: TrainingBatch, head: TargetHead, weights: LossWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of weighted losses, sum of weights), of all valid slots; gradients of the sum are added on the way.

    hidden: [C, A, B - 1, hidden_size], what the network's forward gave. Its logits are made, used and forgotten a few
    rows at a time: of all slots at once, memory traffic takes as long as the products.
    """
    slots = torch.arange(batch.valid.shape[-1], device=hidden.device)
    weight = torch.exp(-slots / weights.decay).expand(batch.valid.shape)[batch.valid]
    rows = hidden[batch.valid]
    leaf = rows.detach().requires_grad_()
    previous = batch.anchors.tokens[:, :, :-1][batch.valid]
    total = torch.zeros((), device=hidden.device)
    slots_of = (leaf, batch.target_hidden[batch.valid], batch.labels[batch.valid], previous, weight)
    for states, wanted, labels, before, weighs in zip(*(t.split(_ROWS) for t in slots_of), strict=True):
        loss = _slots_loss(network, states, wanted, labels, before, weighs, head, weights)
        loss.backward()
        total += loss.detach()
    rows.backward(leaf.grad)
    return total, weight.sum()


def _slots_loss(
    network: DraftNetwork,
    hidden: torch.Tensor,
    target_hidden: torch.Tensor,
    labels: torch.Tensor,
    previous: torch.Tensor,
    weight: torch.Tensor,
    head: TargetHead,
    weights: LossWeights,
) -> torch.Tensor:
    """Sum of weighted losses of some slots; previous: the token before each label."""
    with torch.no_grad():
        wanted = head.probabilities(target_hidden)
        index = head.index(labels)
        known = index >= 0
        # A token the head lacks cannot be proposed: only the distribution teaches there.
        share = torch.where(known, weights.distribution, 1.0)[:, None]
        wanted *= share
        wanted.scatter_add_(1, index.clamp(min=0)[:, None], 1 - share)
    logits = network.logits(hidden)
    losses = F.cross_entropy(logits, wanted, reduction="none")
    if network.config.dflash2:
        losses = losses + weights.selector * _selector_loss(network, hidden, logits, wanted, index, previous, head)
    return (weight * losses).sum()


def _selector_loss(
    network: DraftNetwork,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    wanted: torch.Tensor,
    index: torch.Tensor,
    previous: torch.Tensor,
    head: TargetHead,
) -> torch.Tensor:
    """Per slot: cross-entropy over the best candidates, given the true predecessor; 0 where the token that came is not
    among them."""
    assert network.config.dflash2
    candidates = logits.detach().topk(network.config.dflash2.selector_top_k, dim=-1).indices
    scores = logits.gather(1, candidates) + network.candidate_selector(hidden, previous, head.tokens[candidates])
    targets = wanted.gather(1, candidates)
    found = (candidates == index[:, None]).any(dim=1)
    targets = targets / targets.sum(dim=1, keepdim=True).clamp(min=math.ulp(1.0))
    return F.cross_entropy(scores, targets, reduction="none") * found
