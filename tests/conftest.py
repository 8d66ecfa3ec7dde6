"""Settings of the test process, inherited by the processes it starts. Must run before torch is imported."""

import atexit
import os
import sys

# Idle OpenMP threads that spin starve the others where tests, services and peers share few cores.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# Triton kernels run on CPU tensors, by numpy. Triton reads it when it is first imported.
os.environ.setdefault("TRITON_INTERPRET", "1")


@atexit.register
def _hide_what_triton_leaks() -> None:
    """Its bindings print a page of it when the interpreter ends, behind the test results."""
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
