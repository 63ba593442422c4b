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

    There is an earlier one if Ray was restarted on this machine, or if `inv up` has replaced the code.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        if earlier := running(name):
            earlier.terminate()
    try:
        pid_file(name).write_text(str(os.getpid()))
    except OSError as error:  # for example, because the disk is full; without this process, the machine would shut down
        log.warning("%s was not written, so this process cannot be replaced later: %s", pid_file(name), error)


def running(name: str) -> psutil.Process | None:
    """Return the process that has saved its pid under this name, or None if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess, ValueError, FileNotFoundError):
        found = psutil.Process(int(pid_file(name).read_text()))
        # the pid may belong to another process by now; before an upgrade, the module may have been in another package
        if any(word.endswith(f".node.{name}") for word in found.cmdline()):
            return found
    return None


def pid_file(name: str) -> Path:
    """Return the file in which a process saves its pid."""
    return Path(f"~/{name}.pid").expanduser()
