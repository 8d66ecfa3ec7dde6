"""Tandem: speculative decoding served by cooperating processes."""

from importlib.metadata import version

__version__ = version("tandem")
