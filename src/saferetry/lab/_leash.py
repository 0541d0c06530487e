"""Child processes that never outlive this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs in place of the command and becomes it. PR_SET_PDEATHSIG (1) survives execv; doing it here rather than in a
# preexec_fn keeps fork safe in a process that has threads.
_LEASH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def leashed(command: Sequence[str]) -> list[str]:
    """Return a command that runs this one and dies with us (on Linux; elsewhere the command itself).

    The kernel sends the death signal when the *thread* that forked ends (prctl(2)): that thread must live as long.

    Args:
        command: the program's absolute path and its arguments.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *command]
