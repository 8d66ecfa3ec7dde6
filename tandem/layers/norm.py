"""Normalisation."""

from tandem.kernels.rms_norm import rms_norm

__all__ = ["rms_norm"]
