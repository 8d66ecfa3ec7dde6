"""Runs a command that the kernel kills when the process which started it dies, even by SIGKILL (Linux).

    python die_with_parent.py PARENT_PID COMMAND ARGUMENT...

A script of its own and not a preexec_fn: that would run Python between fork and exec in a process with gRPC threads.
PR_SET_PDEATHSIG (prctl(2)) survives exec. Standard library only, so that it costs little to start.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Arms the signal, checks that the parent did not die before, becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
