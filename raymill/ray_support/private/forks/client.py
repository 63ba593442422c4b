"""Starts a Ray worker: as a fork of the server if that works, or as Ray does. Ray runs this for each worker."""

import importlib.util
import json
import os
import socket
import sys


def is_forked(arguments: list[str]) -> bool:
    """Ask the server for a fork with this process's environment, folder, open files, and priority."""
    message = {
        "arguments": arguments,
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "leads_group": os.getpgid(0) == os.getpid(),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.environ["RAYMILL_FORK_SERVER"])
            socket.send_fds(connection, [b"\n"], [0, 1, 2])
            connection.sendall(json.dumps(message).encode())
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == b"1"
        except OSError:  # the server is still importing, or has ended
            return False


if not is_forked(sys.argv[1:]):
    ray = importlib.util.find_spec("ray")
    assert ray
    assert ray.submodule_search_locations
    program = f"{ray.submodule_search_locations[0]}/_private/workers/setup_worker.py"
    os.execv(sys.executable, [sys.executable, program, *sys.argv[1:]])
