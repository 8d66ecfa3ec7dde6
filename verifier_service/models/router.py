"""The router of a mixture of experts, computed in fp32: softmax (Qwen3-MoE, Mixtral) or sigmoid with a bias and groups
(DeepSeek-V3, arXiv 2412.19437)."""

import torch

from tandem.checkpoints.weights import WeightReader
from tandem.layers.linear import Linear
from verifier_service.models.min_rows import pad_rows
from verifier_service.models.target_config import Mixture


class Router:
    """Chooses every row's experts. All ranks hold it and choose alike."""

    def __init__(self, mixture: Mixture, hidden: int, reader: WeightReader, prefix: str):
        self._routing = mixture.routing
        self._count = mixture.experts_per_token
        weight = reader.tensor(f"{prefix}weight", (mixture.experts, hidden), dtype=torch.float32)
        self.device = weight.device
        self._gate = Linear(weight)
        self._bias = None
        if mixture.routing.sigmoid:
            name = f"{prefix}e_score_correction_bias"
            self._bias = reader.tensor(name, (mixture.experts,), dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, hidden] to weights fp32 and expert ids int64, both [rows, experts per token], in no order."""
        routing = self._routing
        logits = self._gate(pad_rows(x.float()))[: x.shape[0]]
        # The vector unit's sigmoid differs from the one that does what is left over: in fp64 it cannot be seen.
        scores = logits.double().sigmoid().float() if routing.sigmoid else logits.softmax(dim=-1)
        choice = scores if self._bias is None else scores + self._bias
        if routing.groups > 1:
            choice = self._in_best_groups(choice)
        ids = choice.topk(self._count, dim=-1).indices
        weights = scores.gather(1, ids)
        if routing.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * routing.scale, ids

    def _in_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """-inf for experts outside the groups whose two best experts sum highest."""
        grouped = choice.view(choice.shape[0], self._routing.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self._routing.kept_groups, dim=-1).indices
        dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, False)
        return grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
