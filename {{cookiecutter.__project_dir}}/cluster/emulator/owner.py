"""Run a module that ends when the verb that started it ends, even if that verb is killed.

python -m cluster.emulator.owner MODULE [ARGUMENTS]

Its stdin is a pipe that only the verb can write to. However the verb ends, the kernel closes the pipe.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
from typing import Any

import settings

RELEASED = b"\n"


def start(module: str, *arguments: str, prefix: tuple[str, ...] = (), **options: Any) -> subprocess.Popen:
    """Start `module` in its own session. It ends with this process, or when its `stdin` is closed.

    `prefix`: a command to run it with, such as unshare. `options`: passed to Popen.
    """
    command = [*prefix, sys.executable, "-m", "cluster.emulator.owner", module, *arguments]
    return subprocess.Popen(command, cwd=settings.PROJECT, stdin=subprocess.PIPE, start_new_session=True, **options)


def release(process: subprocess.Popen) -> None:
    """Let the process outlive this one."""
    assert process.stdin
    process.stdin.write(RELEASED)
    process.stdin.close()


def _end_with_owner() -> None:
    if os.read(0, 1) == RELEASED:
        return
    os.killpg(0, signal.SIGKILL)
    os._exit(1)  # process 1 of a namespace is immune to signals that it sends itself


if __name__ == "__main__":
    threading.Thread(target=_end_with_owner, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
