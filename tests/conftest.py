"""Settings of the test process, inherited by the processes it starts. Must run before torch is imported."""

import os

# Idle OpenMP threads that spin starve the others where tests, services and peers share few cores.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
# Triton kernels run on CPU tensors, by numpy. Triton reads it when it is first imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
