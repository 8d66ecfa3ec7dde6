"""The weights of many experts in one tensor per layer and form: what a grouped product reads."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tandem.errors import StartupError
from tandem.layers.fp8_linear import Fp8Linear
from tandem.layers.int4_linear import Int4Linear
from tandem.layers.linear import Linear

ExpertLinear = Linear | Fp8Linear | Int4Linear

_FP8_COLUMNS = 16
"""Columns of a product that a GPU's matrix unit takes at once: they must share a scale."""


@dataclass(frozen=True)
class StackedLinears:
    """Linear layers of one form and shape: `stored` of each, one after another."""

    values: torch.Tensor
    """[experts, out, in] of the activations' dtype or float8_e4m3fn; [experts, out, in / 2] uint8, of each byte the low
    nibble the even column."""
    scale: torch.Tensor | None = None
    """Of fp8 [experts, out, blocks of 128 columns] fp32, of int4 [experts, out, in / 32]."""
    first_column: int = 0
    """Of fp8: where in the first block the columns begin."""

    @property
    def form(self) -> str:
        """plain, fp8 or int4."""
        if self.scale is None:
            return "plain"
        return "int4" if self.values.dtype == torch.uint8 else "fp8"

    @property
    def nbytes(self) -> int:
        """Memory they take."""
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def one(self, expert: int) -> ExpertLinear:
        """An expert's layer, over the same memory."""
        if self.scale is None:
            return Linear(self.values[expert])
        if self.form == "int4":
            return Int4Linear(self.values[expert], self.scale[expert])
        return Fp8Linear(self.values[expert], self.scale[expert], self.first_column)


@dataclass(frozen=True)
class ExpertStack:
    """Experts down(silu(gate x) * up x)."""

    gate_up: StackedLinears
    """[experts, 2 * inner, hidden]: of each the rows of gate before those of up."""
    down: StackedLinears
    """[experts, hidden, inner]."""

    @property
    def count(self) -> int:
        return len(self.gate_up.values)

    @property
    def nbytes(self) -> int:
        """Memory they take."""
        return self.gate_up.nbytes + self.down.nbytes

    @classmethod
    def of(cls, experts: Iterable[tuple[ExpertLinear, ExpertLinear]], count: int) -> "ExpertStack":
        """count pairs of gate_up and down, each copied before the next is asked for: two at most exist twice.

        StartupError where they are not alike, or where fp8 columns were cut within 16 that share a scale.
        """
        stacks: list[StackedLinears] = []
        for i, linears in enumerate(experts):
            if not stacks:
                stacks = [_empty(linear, count) for linear in linears]
            for stack, linear in zip(stacks, linears, strict=True):
                _put(stack, i, linear)
        return cls(*stacks)


def _empty(linear: ExpertLinear, count: int) -> StackedLinears:
    values, scale = linear.stored
    first_column = linear.first_column if isinstance(linear, Fp8Linear) else 0
    if first_column % _FP8_COLUMNS:
        raise StartupError(
            f"experts in fp8: a rank's columns begin at column {first_column} of a block of 128, must be a multiple of "
            f"{_FP8_COLUMNS}"
        )
    return StackedLinears(
        values.new_empty((count, *values.shape)),
        None if scale is None else scale.new_empty((count, *scale.shape)),
        first_column,
    )


def _put(stack: StackedLinears, index: int, linear: ExpertLinear) -> None:
    for room, part in zip((stack.values, stack.scale), linear.stored, strict=True):
        if (room is None) != (part is None) or (
            room is not None and part is not None and (room.dtype, room.shape[1:]) != (part.dtype, part.shape)
        ):
            raise StartupError(
                f"experts of one layer: all must be stored alike, but number {index} of those held here is not like "
                f"the first: {_described(part)} and {_described(room)}"
            )
        if room is not None and part is not None:
            room[index].copy_(part)


def _described(tensor: torch.Tensor | None) -> str:
    return "no scale" if tensor is None else f"{tensor.dtype} {list(tensor.shape[-2:])}"
