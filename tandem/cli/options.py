"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

AddressOption = Annotated[str, typer.Option(help="The gateway's HOST:PORT.", envvar="TANDEM_ADDRESS")]
ConfigOption = Annotated[Path, typer.Option(help="The stack's YAML file.")]

EpOption = Annotated[int | None, typer.Option(help="Ranks of the target, in place of verifier.parallel.ep.")]
TpOption = Annotated[int | None, typer.Option(help="1 or as many as --ep, in place of verifier.parallel.tp.")]

DEFAULT_ADDRESS = "127.0.0.1:7600"
DEFAULT_CONFIG = Path("configs/demo.yaml")


class SpeculationMode(StrEnum):
    """How drafts are used."""

    DEFAULT = "default"
    OFF = "off"
    BLOCK = "block"
    TREE = "tree"
    AUTO = "auto"


SystemOption = Annotated[str | None, typer.Option(help="A system message before the question.")]
MaxTokensOption = Annotated[int | None, typer.Option(help="Tokens to emit at most. Unset: the gateway's default.")]
TemperatureOption = Annotated[float | None, typer.Option(help="0 takes the likeliest token. Unset: the model's own.")]
TopPOption = Annotated[float | None, typer.Option(help="Smallest set of tokens that reaches this probability.")]
TopKOption = Annotated[int | None, typer.Option(help="This many likeliest tokens; 0 keeps all.")]
MinPOption = Annotated[float | None, typer.Option(help="Tokens with at least this share of the top probability.")]
SeedOption = Annotated[int | None, typer.Option(help="Same seed, same text, with speculation off or on.")]
SpeculationModeOption = Annotated[SpeculationMode, typer.Option(help="How drafts are used.")]
MaxDraftNodesOption = Annotated[int | None, typer.Option(help="Draft tokens verified per step at most.")]
