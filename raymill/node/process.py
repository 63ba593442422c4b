"""The processes of this project that cluster.yaml starts on a node."""

import contextlib
import logging
import os
from pathlib import Path

import psutil

log = logging.getLogger(__name__)


def write_log() -> None:
    """Let this process write what it logs to stderr. Unlike `print`, `logging` raises no error if the disk is full."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


def take_over(name: str) -> None:
    """Save the pid of this process, which runs raymill.node.NAME, in ~/NAME.pid. First terminate an earlier one.

    There is an earlier one if Ray was restarted on this machine.
    """
    pid_file = Path(f"~/{name}.pid").expanduser()
    if pid_file.exists():
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            earlier = psutil.Process(int(pid_file.read_text()))
            if f"raymill.node.{name}" in earlier.cmdline():  # the pid may belong to another process by now
                earlier.terminate()
    try:
        pid_file.write_text(str(os.getpid()))
    except OSError as error:  # for example, because the disk is full; without this process, the machine would shut down
        log.warning("%s was not written, so this process cannot be replaced later: %s", pid_file, error)
