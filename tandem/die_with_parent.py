"""Ties a process to its parent: the kernel kills it when the parent dies, even by SIGKILL (Linux).

    python die_with_parent.py PARENT_PID COMMAND ARGUMENT...

runs a command that way. A script of its own and not a preexec_fn: that would run Python between fork and exec in a
process with gRPC threads. PR_SET_PDEATHSIG (prctl(2)) survives exec. Standard library only, so that it costs little to
start.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Arms the signal; ends this process if the parent died before. The parent is the thread that forked."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
