"""The files of `tandem experts plan`: how many tokens each expert got, and which rank is to hold which experts.

JSON, one layer a line. Layers are those with a mixture of experts, by their number in the target.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.errors import StartupError

Layer = Annotated[int, Field(ge=0)]
Content = TypeVar("Content", bound=BaseModel)


class ExpertLoads(BaseModel):
    """What a verifier writes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    layers: Annotated[dict[Layer, list[Annotated[int, Field(ge=0)]]], Field(min_length=1)]
    """Of each layer the tokens that each expert got, in order of ids."""


class ExpertPlacement(BaseModel):
    """What a verifier reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    ranks: Annotated[int, Field(ge=1)]
    layers: dict[Layer, list[list[int]]]
    """Of each layer and rank the ids of the experts held there."""


def read_loads(path: Path) -> ExpertLoads:
    """StartupError names the file and the key."""
    return _read(path, ExpertLoads)


def read_placement(path: Path, layers: Collection[int], experts: int, ranks: int) -> dict[int, list[list[int]]]:
    """A placement for a target with so many experts in these layers, on so many ranks: of each layer and rank the ids.

    StartupError names the file, the layer and what is wrong with it.
    """
    placement = _read(path, ExpertPlacement)
    if placement.ranks != ranks:
        raise StartupError(f"{path}: ranks: is for {placement.ranks}, but verifier.parallel.ep is {ranks}")
    for layer in sorted({*layers, *placement.layers}):
        if layer not in placement.layers:
            raise StartupError(f"{path}: layer {layer}: missing; the target has {experts} experts there")
        if layer not in layers:
            raise StartupError(f"{path}: layer {layer}: the target has no experts there")
        problem = _problem(placement.layers[layer], experts, ranks)
        if problem:
            raise StartupError(f"{path}: layer {layer}: {problem}")
    return placement.layers


def write_loads(path: Path, loads: ExpertLoads) -> None:
    """Replaces the file in one step: readers see the old one or the new one. OSError if it cannot."""
    _write(path, {"model": loads.model}, loads.layers)


def write_placement(path: Path, placement: ExpertPlacement) -> None:
    """As write_loads."""
    _write(path, {"model": placement.model, "ranks": placement.ranks}, placement.layers)


def _problem(placed: Sequence[Sequence[int]], experts: int, ranks: int) -> str | None:
    if len(placed) != ranks:
        return f"has {len(placed)} ranks, must have {ranks}"
    for rank, held in enumerate(placed):
        if len(held) * ranks != experts:
            return f"rank {rank} has {len(held)} experts; each of {ranks} ranks must have an equal part of {experts}"
    for expert, expected in zip(sorted(e for held in placed for e in held), range(experts), strict=True):
        if not 0 <= expert < experts:
            return f"expert {expert}: the target has 0 to {experts - 1}"
        if expert != expected:
            return f"expert {expert} is there twice" if expert < expected else f"expert {expected} is missing"
    return None


def _read(path: Path, kind: type[Content]) -> Content:
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise StartupError(f"{path}: {key}: {first['msg']}" if key else f"{path}: {first['msg']}") from None


def _write(path: Path, head: Mapping[str, str | int], layers: Mapping[int, Sequence[object]]) -> None:
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    lines.append('"layers": {\n' + ",\n".join(f'  "{i}": {json.dumps(layers[i])}' for i in sorted(layers)) + "\n}")
    part = path.with_name(f".{path.name}.part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(part, path)
