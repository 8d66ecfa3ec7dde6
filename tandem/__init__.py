"""Tandem: speculative decoding served by cooperating processes."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]
__version__ = version("tandem")


def __getattr__(name: str) -> Any:
    # The client loads grpc: only those who use it pay for that.
    if name in ("AsyncClient", "Client"):
        from tandem import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
