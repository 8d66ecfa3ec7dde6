#!/usr/bin/env bash
# Installs what is missing and runs benchmarks/gpu_check.py: `benchmarks/gpu_check.sh --json gpu-check.json`.
# PYTHON names the interpreter; unset it is .venv's, which is made where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -z ${PYTHON:-} ]]; then
  if [[ ! -x .venv/bin/python ]]; then
    # With the system's packages: a machine with a GPU often comes with a torch that fits its driver.
    python3 -m venv --system-site-packages .venv
  fi
  PYTHON=.venv/bin/python
fi

needed=(torch triton numpy safetensors transformers pytest pytest_asyncio pytest_timeout hypothesis rich grpc pydantic)
if ! "$PYTHON" - "${needed[@]}" <<'CHECK'
import sys
from importlib.util import find_spec
missing = [name for name in sys.argv[1:] if find_spec(name) is None]
print("missing:", ", ".join(missing)) if missing else None
sys.exit(bool(missing))
CHECK
then
  "$PYTHON" -m pip install --quiet -e '.[worker]' 'transformers>=5' pytest pytest-asyncio pytest-timeout hypothesis scipy
fi

# Whatever hangs, the whole ends: the parts' own limits come to less.
exec timeout --kill-after=10 475 "$PYTHON" -m benchmarks.gpu_check "$@"
