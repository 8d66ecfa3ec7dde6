"""Random experts in each form a checkpoint stores them in, and what a mixture of them says in float64."""

import torch

from tandem.kernels.expert_stack import ExpertStack, StackedLinears


def stack(form: str, experts: int, hidden: int, inner: int, dtype: torch.dtype, first_column: int = 0) -> ExpertStack:
    """first_column: where in a block of 128 the columns of `down` begin."""
    generator = torch.Generator().manual_seed(experts + hidden + inner)

    def linears(out: int, columns: int, first: int) -> StackedLinears:
        if form == "int4":
            packed = torch.randint(0, 256, (experts, out, columns // 2), dtype=torch.uint8, generator=generator)
            scale = torch.rand(experts, out, columns // 32, generator=generator) / 8 / columns**0.5
            return StackedLinears(packed, scale.bfloat16())
        values = torch.randn(experts, out, columns, generator=generator)
        if form == "fp8":
            scale = torch.rand(experts, out, -(-(first + columns) // 128), generator=generator) / columns**0.5
            return StackedLinears(values.to(torch.float8_e4m3fn), scale, first)
        return StackedLinears((values / columns**0.5).to(dtype))

    return ExpertStack(linears(2 * inner, hidden, 0), linears(hidden, inner, first_column))


def dense(linears: StackedLinears, expert: int) -> torch.Tensor:
    """One expert's weight [out, in] in float64, element by element as its format is defined."""
    values = linears.values[expert]
    if linears.scale is None:
        return values.double()
    scale = linears.scale[expert].double()
    if linears.form == "int4":
        columns = torch.arange(2 * values.shape[1])
        nibbles = values[:, columns // 2].int() >> (4 * (columns % 2)).int() & 0xF
        return (nibbles.double() - 8) * scale[:, columns // 32]
    columns = torch.arange(values.shape[1])
    return values.double() * scale[:, (linears.first_column + columns) // 128]


def said_by_held(x: torch.Tensor, experts: ExpertStack, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The mixture, row by row and choice by choice, [rows, hidden] float64."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for weight, place in zip(weights[row].tolist(), places[row].tolist(), strict=True):
            if place < experts.count:
                gate, up = (dense(experts.gate_up, place) @ x[row].double()).chunk(2)
                total[row] += weight * (dense(experts.down, place) @ (gate * gate.sigmoid() * up))
    return total


def routing(rows: int, k: int, experts: int, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and places of rows that go to k different experts each, of which `experts` are held here."""
    generator = torch.Generator().manual_seed(rows * k)
    weights = torch.rand(rows, k, generator=generator)
    wide = torch.rand(rows, max(experts, k) + 2, generator=generator).argsort(dim=-1)[:, :k].clamp(max=experts)
    if how == "any":
        return weights, wide
    if how == "one expert":
        wide[:] = experts
        wide[:, k // 2] = experts - 1
    elif how == "none held":
        wide[:] = experts
    return weights, wide
