"""Starts a Ray worker, or runs a script, in a fork of the server. Ray runs this program for each worker.

If there is no server, or it refuses, a worker starts as Ray does it, and a script runs on in its own process.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

SOCKET = "RAYMILL_FORK_SERVER"
"""Environment variable: the path of the server's socket."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ask(message: Mapping[str, Any]) -> socket.socket | None:
    """Ask the server for a fork with this process's environment, folder, open files, and priority.

    Return a connection that was accepted, or None.
    """
    connection = socket.socket(socket.AF_UNIX)
    common = {
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }
    try:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        connection.sendall(json.dumps({**common, **message}).encode())
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1) == b"1":
            return connection
    except OSError:  # the server has ended
        pass
    connection.close()
    return None


def hand_over(main: ModuleType) -> None:
    """Run the program in a fork of the server, and end as the fork ends. Return if that is not possible.

    `main` is the module `__main__` of a process that was started as `python -m`. The fork gets the signals that ask
    this process to end, and ends with it.
    """
    is_fork = "ray" in sys.modules
    if SOCKET not in os.environ or is_fork or main.__spec__ is None:
        return
    python = [sys.executable, repr(sys.flags), repr(sys._xoptions), repr(sys.warnoptions)]
    sys.stdout.flush()
    message = {"module": main.__spec__.name, "python": python, "arguments": sys.argv}
    if connection := ask(message):
        with connection, connection.makefile("rb") as stream:
            fork = int(stream.readline())
            for number in FORWARDED:
                signal.signal(number, lambda number, _: os.kill(fork, number))
            code = os.waitstatus_to_exitcode(int(stream.readline() or b"9"))
        if code < 0:
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


if __name__ == "__main__" and not ask({"arguments": sys.argv[1:], "leads_group": os.getpgid(0) == os.getpid()}):
    ray = importlib.util.find_spec("ray")
    assert ray
    assert ray.submodule_search_locations
    program = f"{ray.submodule_search_locations[0]}/_private/workers/setup_worker.py"
    os.execv(sys.executable, [sys.executable, program, *sys.argv[1:]])
