"""Find and end the processes of the local cluster, and no others."""

import contextlib
import os
import signal
from typing import Any

import psutil

from raymill.local.state import boot_id

MARK = "RAY_PROJECT_CLUSTER"
"""Environment variable with the cluster's id. Every process that the cluster starts inherits it."""


def find(state: dict[str, Any]) -> list[psutil.Process]:
    """Return all live processes of this cluster, and no others.

    Ray's own processes are in the session that `up` opened; some lack the mark, because they overwrite their
    environment with a process title. A job's driver opens a new session but has the mark. All others are descendants
    of these processes.
    """
    found: dict[int, psutil.Process] = {}
    session = state.get("session") if _owns_session(state) else None
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session or process.environ().get(MARK) == state["id"]:
                found |= {member.pid: member for member in [process, *process.children(recursive=True)]}
        except (psutil.Error, OSError):
            continue  # it has ended, or belongs to another user
    return [process for process in found.values() if is_alive(process) and process.pid != os.getpid()]


def end(state: dict[str, Any], timeout_s: float = 5) -> None:
    """End all processes of this cluster. Kill those that are still running after `timeout_s`."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        processes = find(state)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)
        psutil.wait_procs(processes, timeout=timeout_s)


def head_is_alive(state: dict[str, Any]) -> bool:
    """Return whether the process that `up` started is alive. After a reboot, another process may have its pid."""
    try:
        return any(state["temp"] in word for word in psutil.Process(state["session"]).cmdline())
    except (KeyError, psutil.Error):  # a zombie has no command line
        return False


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _owns_session(state: dict[str, Any]) -> bool:
    """Return whether the session id still belongs to the cluster. After a reboot, another session may have it."""
    try:
        if is_alive(psutil.Process(state["session"])):
            return head_is_alive(state)
    except (KeyError, psutil.NoSuchProcess):
        pass
    return state.get("boot") == boot_id()  # no new session gets this id while the old one has members
