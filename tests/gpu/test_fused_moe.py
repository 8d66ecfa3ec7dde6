"""The compiled mixture of experts in bf16 against dequantised weights in fp32, and in the memory of a captured step."""

import pytest
import torch

from tandem.kernels.expert_stack import ExpertStack, StackedLinears
from tandem.kernels.fused_moe import fused_moe
from tests.unit.kernels.experts import dense, routing, stack

_FORMS = pytest.mark.parametrize("form", ["plain", "int4", "fp8"])


def _to(linears: StackedLinears, device: torch.device) -> StackedLinears:
    scale = None if linears.scale is None else linears.scale.to(device)
    return StackedLinears(linears.values.to(device), scale, linears.first_column)


def _on(experts: ExpertStack, device: torch.device) -> ExpertStack:
    return ExpertStack(_to(experts.gate_up, device), _to(experts.down, device))


def _expected(x: torch.Tensor, experts: ExpertStack, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape)
    for i in range(experts.count):
        gate, up = (x.float() @ dense(experts.gate_up, i).float().T).chunk(2, dim=-1)
        said = (gate * gate.sigmoid() * up) @ dense(experts.down, i).float().T
        total += said * torch.where(places == i, weights, 0.0).sum(-1, keepdim=True)
    return total


@_FORMS
@pytest.mark.parametrize(("rows", "k"), [(1, 4), (5, 8), (64, 4), (300, 8)])
@pytest.mark.parametrize("how", ["any", "one expert", "none held"])
@pytest.mark.parametrize(("hidden", "inner", "first_column"), [(1024, 512, 0), (992, 288, 96)])
def test_a_mixture_is_what_its_experts_say(
    device: torch.device, form: str, rows: int, k: int, how: str, hidden: int, inner: int, first_column: int
) -> None:
    """Both classes of tuned shapes, whole tiles and not. bf16: what a slot says is rounded twice on its way."""
    experts = stack(form, 12, hidden, inner, torch.bfloat16, first_column)
    weights, places = routing(rows, k, experts.count, how)
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    said = fused_moe(x.to(device), _on(experts, device), weights.to(device), places.to(device)).cpu()
    expected = _expected(x, experts, weights, places)
    torch.testing.assert_close(said, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()) + 1e-9)


@_FORMS
def test_a_rows_bits_do_not_depend_on_what_shares_the_step(device: torch.device, form: str) -> None:
    """Across both classes of the default's tiles."""
    experts = _on(stack(form, 12, 1024, 512, torch.bfloat16), device)
    weights, places = (part.to(device) for part in routing(400, 4, 12, "any"))
    x = torch.randn(400, 1024, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    together = fused_moe(x, experts, weights, places)
    for rows in (1, 3, 17, 80, 200):
        assert torch.equal(fused_moe(x[:rows], experts, weights[:rows], places[:rows]), together[:rows])


@_FORMS
def test_a_captured_mixture_follows_its_inputs(device: torch.device, form: str) -> None:
    """Replayed with another routing it says what an eager call says: its launches do not depend on the routing."""
    experts = _on(stack(form, 12, 1024, 512, torch.bfloat16), device)
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    weights, places = (part.to(device) for part in routing(16, 4, 12, "one expert"))
    fused_moe(x, experts, weights, places)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = fused_moe(x, experts, weights, places)
    for how in ("any", "none held", "one expert"):
        places.copy_(routing(16, 4, 12, how)[1])
        graph.replay()
        assert torch.equal(said, fused_moe(x, experts, weights, places))
