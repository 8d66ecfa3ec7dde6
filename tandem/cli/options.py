"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.console import fail

if TYPE_CHECKING:
    from tandem.tls import ClientFiles

AddressOption = Annotated[str, typer.Option(help="The gateway's HOST:PORT.", envvar="TANDEM_ADDRESS")]
TlsCaOption = Annotated[
    Path | None,
    typer.Option(help="Call by TLS; trust these authorities (PEM).", envvar="TANDEM_TLS_CA"),
]
TlsCertOption = Annotated[
    Path | None, typer.Option(help="The certificate to show, where the gateway asks for one.", envvar="TANDEM_TLS_CERT")
]
TlsKeyOption = Annotated[Path | None, typer.Option(help="Its key.", envvar="TANDEM_TLS_KEY")]
ConfigOption = Annotated[Path, typer.Option(help="The stack's YAML file.")]

EpOption = Annotated[int | None, typer.Option(help="Ranks of the target, in place of verifier.parallel.ep.")]
TpOption = Annotated[int | None, typer.Option(help="1 or as many as --ep, in place of verifier.parallel.tp.")]


def tls_files(ca: Path | None, certificate: Path | None, key: Path | None) -> "ClientFiles | None":
    """What the options say; None for plain text."""
    if ca is None:
        if certificate or key:
            fail("--tls-cert and --tls-key need --tls-ca", code=2)
        return None
    from tandem.tls import ClientFiles

    return ClientFiles(ca, certificate, key, "--tls")


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
