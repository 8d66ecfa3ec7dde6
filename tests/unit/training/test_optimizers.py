"""Muon against its definition, and which parameters it moves."""

from pathlib import Path

import pytest
import torch

from draft_training.config import TrainingSection
from draft_training.muon import Muon, orthogonal
from draft_training.optimizers import make_optimizers
from tests.unit.training.test_network import World


@pytest.mark.parametrize("shape", [(24, 80), (80, 24), (48, 48)])
def test_all_directions_count_the_same(shape: tuple[int, int]) -> None:
    """The singular vectors stay, the singular values come near 1, as far as they are above 1/100 of the largest."""
    g = torch.Generator().manual_seed(0)
    size = min(shape)
    u, _ = torch.linalg.qr(torch.randn(shape[0], size, generator=g))
    v, _ = torch.linalg.qr(torch.randn(shape[1], size, generator=g))
    found = u.T @ orthogonal(u * torch.logspace(-2, 0, size) * 30 @ v.T) @ v
    assert found.diagonal().min() > 0.85
    assert found.diagonal().max() < 1.15
    assert (found - found.diagonal().diag()).abs().max() < 1e-3


def test_a_step_is_nesterov_momentum_made_orthogonal() -> None:
    """Two steps by the formula: decay, then minus rate x 0.2 x sqrt(longer side) x orthogonal(nesterov momentum)."""
    g = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(6, 10, generator=g))
    optimizer = Muon([weight], weight_decay=0.3, momentum=0.9)
    optimizer.param_groups[0]["lr"] = 0.1
    expected, momentum = weight.detach().clone(), torch.zeros(6, 10)
    for _ in range(2):
        weight.grad = torch.randn(6, 10, generator=g)
        momentum = 0.9 * momentum + 0.1 * weight.grad
        update = orthogonal(0.1 * weight.grad + 0.9 * momentum)
        expected = expected * (1 - 0.1 * 0.3) - 0.1 * 0.2 * 10**0.5 * update
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer(optimizer: str, tmp_path: Path) -> None:
    """Muon has the matrices of layers and fc and no other; only matrices decay."""
    network = World(tmp_path, "DFlash2").network
    made = make_optimizers(network, TrainingSection(optimizer=optimizer, weight_decay=0.2))  # type: ignore[arg-type]
    groups = [(name, group) for name, o in made.items() for group in o.param_groups]
    moved = [id(p) for _, group in groups for p in group["params"]]
    assert sorted(moved) == sorted(map(id, network.parameters()))
    names = {id(p): name for name, p in network.named_parameters()}
    for by, group in groups:
        for p in group["params"]:
            matrix = p.dim() == 2 and "codebook" not in names[id(p)]
            assert by == ("muon" if matrix and optimizer == "muon" else "adamw")
            assert group["weight_decay"] == (0.2 if p.dim() > 1 else 0.0)
