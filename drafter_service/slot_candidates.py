"""From a forward's logits to what its slots propose. Rows are the slots of all blocks, one block after another."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from drafter_service.draft_weights import SelectorWeights
from tandem.draft_tree import Candidates, Draft
from tandem.kernels.top_k import top_k
from tandem.layers.dflash2 import transition_scores
from tandem.layers.top_k import top_k_rows


def greedy_blocks(logits: torch.Tensor, draft_tokens: torch.Tensor | None, slots: Sequence[int]) -> list[Draft]:
    """The most probable token of every slot, for slots that do not see each other's proposals.

    logits [rows, head] fp32; draft_tokens [head]: the token of each column; slots: rows of each block.
    """
    values, tokens, log_sums = top_k(logits, 1)
    log_probs = (values[:, 0] - log_sums).tolist()
    best = tokens[:, 0]
    flat_tokens = (best if draft_tokens is None else draft_tokens[best]).tolist()
    return [Draft.block(flat_tokens[rows], log_probs[rows]) for rows in _of_blocks(slots)]


def independent_candidates(
    logits: torch.Tensor, draft_tokens: torch.Tensor | None, slots: Sequence[int], k: int
) -> list[Candidates]:
    """The k most probable tokens of every slot, for slots that do not see each other's proposals."""
    values, tokens, log_sums = top_k(logits, k)
    log_probs = (values - log_sums[:, None])[:, None].tolist()
    flat_tokens = (tokens if draft_tokens is None else draft_tokens[tokens]).tolist()
    return [Candidates(flat_tokens[rows], log_probs[rows]) for rows in _of_blocks(slots)]


def selected_candidates(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    slots: Sequence[int],
    anchors: torch.Tensor,
    projected: torch.Tensor,
    selector: SelectorWeights,
) -> list[Candidates]:
    """The k tokens of every slot with the largest logits, with what DFlash2's selector makes of each behind each
    candidate of the slot before, or the anchor: a distribution over the k.

    anchors [blocks] int64; projected [rows, r]: the selector's projection of the slots' final hidden states.
    """
    logits, tokens = top_k_rows(logits, selector.top_k)
    if draft_tokens is not None:
        tokens = draft_tokens[tokens]
    before = tokens.roll(1, dims=0)
    blocks = _of_blocks(slots)
    before[[rows.start for rows in blocks]] = anchors[:, None]
    log_probs = selector_log_probs(logits, tokens, before, projected, selector).tolist()
    flat_tokens = tokens.tolist()
    return [
        Candidates(flat_tokens[rows], [log_probs[rows.start][:1], *log_probs[rows.start + 1 : rows.stop]])
        for rows in blocks
    ]


def selector_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    before: torch.Tensor,
    projected: torch.Tensor,
    selector: SelectorWeights,
) -> torch.Tensor:
    """[rows, p, k]: of k tokens behind each of p.

    logits [rows, k] fp32 and tokens [rows, k]: a slot's candidates; before [rows, p]: what may stand before it;
    projected [rows, r]: the selector's projection of the slot's final hidden state.
    """
    predecessors = F.embedding(before, selector.predecessors).float()
    successors = F.embedding(tokens, selector.successors).float()
    scores = logits[:, None] + transition_scores(predecessors, projected.float(), successors)
    return scores.log_softmax(dim=-1)


def _of_blocks(slots: Sequence[int]) -> list[slice]:
    rows, end = [], 0
    for count in slots:
        rows.append(slice(end, end + count))
        end += count
    return rows
