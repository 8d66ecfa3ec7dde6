"""Choosing a token from the target's logits, keyed by position."""

import torch

from tandem.layers.argmax import largest
from tandem.position_random import position_uniforms
from tandem.sampling import SamplingParams

_TOP_P_CANDIDATES = 1024


def sample(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token for `position` from one row of logits [vocab], any float dtype.

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise: softmax(logits / temperature), the
    filters top_k, top_p, min_p in that order, each on what the one before kept, then inversion of the cumulative
    distribution at Philox(seed, position). Kept tokens are accumulated in id order, so two tokens of nearly equal
    probability cannot trade places under rounding.
    """
    if params.greedy:
        return largest(logits)
    probs = torch.softmax(logits.float() / params.temperature, dim=-1)
    kept = _filter(probs, params)
    weights = (probs if kept is None else probs[kept]).double().cumsum(0)
    u = float(position_uniforms(params.seed, position, 1)[0])
    index = int(torch.searchsorted(weights, u * weights[-1], right=True).clamp_(max=len(weights) - 1))
    return index if kept is None else int(kept[index])


def log_prob(logits: torch.Tensor, token: int) -> float:
    """Natural log-probability of a token under one row of logits [vocab], before temperature and filters."""
    row = logits.float()
    return float(row[token] - row.logsumexp(0))


def _filter(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Ids that may be chosen, ascending; None for all. probs: [vocab] fp32."""
    vocab = probs.shape[0]
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    if not top_k and params.top_p >= 1 and params.min_p <= 0:
        return None
    if not top_k and params.top_p >= 1:
        return (probs >= params.min_p * probs.max()).nonzero()[:, 0]
    values, ids = probs.topk(top_k or min(_TOP_P_CANDIDATES, vocab))
    mass = values.sum() if top_k else probs.sum()
    if not top_k and values.sum() < params.top_p * mass:
        values, ids = probs.sort(descending=True)
    keep = values >= params.min_p * values[0]
    if params.top_p < 1:
        # A token stays while the mass before it is short of top_p: the smallest set that reaches top_p.
        keep &= values.cumsum(0) - values < params.top_p * mass
    return ids[keep].sort().values
