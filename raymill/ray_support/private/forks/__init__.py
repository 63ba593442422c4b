"""Lets Ray's workers, and jobs, start as forks of one process that has already imported Ray, torch and transformers.

Ray starts a Python process for each worker, which imports Ray twice, and then what its task needs: two to eight CPU
seconds. A job imports for two to six. A fork takes 0.1 s, and shares the memory of its imports.

`server.py` is that process. Ray runs `client.py` for each worker, and the script of a job calls `client.hand_over`. If
the server cannot give them their environment, they start as usual.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from raymill.ray_support.private.forks.client import SOCKET

FOLDER = Path(__file__).parent


def start(folder: str, late: Iterable[str]) -> subprocess.Popen | None:
    """Start the server, and let the Ray that this process starts use it. It ends when its standard input is closed.

    `folder` must be private: whoever can connect to the server's socket there can run code. `late` has the names of
    variables that only the project's own code reads.

    Relies on `ray._private.ray_constants.SETUP_WORKER_FILENAME`, the name of the program that starts a worker. Ray
    joins it to the path of a folder, so an absolute path replaces both (Ray 2.60).
    """
    from ray._private import ray_constants  # imported late: a script that runs in a fork need not import Ray

    if sys.platform != "linux":  # a fork of a process that has used macOS's frameworks may crash
        return None
    os.environ[SOCKET] = f"{folder}/forks"
    ray_constants.SETUP_WORKER_FILENAME = str(FOLDER / "client.py")
    # Ray's configuration reads these variables once, on import. They may be set: a Ray job may start a cluster.
    changes = {
        "RAY_JOB_ID": "ffffffff",  # any job
        "RAY_RAYLET_PID": str(os.getpid()),  # workers end when this process has ended
    }
    default = {"RAY_AUTH_MODE": "token"}  # `ray.init` sets it later
    return subprocess.Popen(
        [sys.executable, str(FOLDER / "server.py"), os.environ[SOCKET], *late],
        env=default | os.environ | changes,
        stdin=subprocess.PIPE,  # also closed when this process ends
        stdout=subprocess.DEVNULL,
    )
