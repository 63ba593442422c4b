"""The processes of this project that cluster.yaml starts on a node."""

import contextlib
import os
from pathlib import Path

import psutil


def take_over(name: str) -> None:
    """Save the pid of this process, which runs cluster.node.NAME, in ~/NAME.pid. First terminate an earlier one.

    There is an earlier one if Ray was restarted on this machine.
    """
    pid_file = Path(f"~/{name}.pid").expanduser()
    if pid_file.exists():
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            earlier = psutil.Process(int(pid_file.read_text()))
            if f"cluster.node.{name}" in earlier.cmdline():  # the pid may belong to another process by now
                earlier.terminate()
    pid_file.write_text(str(os.getpid()))
