"""A service that is told to end before it serves."""

import signal
import subprocess
import sys

_LOADING = """
import time
from tandem.config import GatewayConfig
from tandem.service_main import set_up_process
set_up_process("gateway", GatewayConfig())
print("loading", flush=True)
time.sleep(60)
"""


def test_sigterm_while_loading_ends_the_process_by_a_handler() -> None:
    """The first process of a container has no default action for signals: without a handler it would load on."""
    process = subprocess.Popen([sys.executable, "-c", _LOADING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"SIGTERM before serving" in errors
