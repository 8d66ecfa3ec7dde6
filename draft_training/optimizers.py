"""Which optimizer moves which of a network's parameters."""

import torch

from draft_training.config import TrainingSection
from draft_training.muon import Muon
from draft_training.network import DraftNetwork


def make_optimizers(network: DraftNetwork, training: TrainingSection) -> dict[str, torch.optim.Optimizer]:
    """By name. Weight decay is for matrices only."""
    matrices = {name: p for name, p in network.named_parameters() if p.dim() > 1}
    vectors = [p for p in network.parameters() if p.dim() <= 1]
    made: dict[str, torch.optim.Optimizer] = {}
    if training.optimizer == "muon":
        # Rows of a codebook are tokens, of which a step sees few: no matrix that directions of a step say much about.
        own = {name: p for name, p in matrices.items() if p.dim() == 2 and not name.endswith("_codebook")}
        matrices = {name: p for name, p in matrices.items() if name not in own}
        made["muon"] = Muon(own.values(), training.weight_decay)
    groups = [
        {"params": list(matrices.values()), "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    made["adamw"] = torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), eps=1e-8)
    return made
