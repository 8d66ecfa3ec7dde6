"""Settings of the test process, inherited by the processes it starts. Must run before torch is imported."""

import os

# Idle OpenMP threads that spin starve the others where tests, services and peers share few cores.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
