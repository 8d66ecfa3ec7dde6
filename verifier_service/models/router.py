"""The router of a mixture of experts, computed in fp32."""

import torch

from tandem.checkpoints.weights import WeightReader
from tandem.kernels.route import route
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
        self.nbytes = weight.nbytes
        self._gate = Linear(weight)
        self._bias = None
        if mixture.routing.sigmoid:
            name = f"{prefix}e_score_correction_bias"
            self._bias = reader.tensor(name, (mixture.experts,), dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, hidden] to weights fp32 and expert ids int64, both [rows, experts per token], in no order."""
        logits = self._gate(pad_rows(x.float()))[: x.shape[0]]
        return route(logits, self._bias, self._count, self._routing)
