"""The Triton kernels behind `tandem.kernels`."""
