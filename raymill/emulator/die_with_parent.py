"""Run a module in a process that dies with its parent, even if the parent is killed.

python -m raymill.emulator.die_with_parent MODULE [ARGUMENTS]

The stdin of the process is a pipe that only the parent can write to. However the parent ends, the kernel closes the
pipe.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
from typing import Any

from raymill import settings

DETACH = b"\n"


def start(module: str, *arguments: str, prefix: tuple[str, ...] = (), **options: Any) -> subprocess.Popen:
    """Start `module` in a new session. It ends with this process, or when its `stdin` is closed.

    `prefix` is a command that runs the module, such as unshare. `options` are passed to Popen.
    """
    command = [*prefix, sys.executable, "-m", "raymill.emulator.die_with_parent", module, *arguments]
    return subprocess.Popen(command, cwd=settings.PROJECT, stdin=subprocess.PIPE, start_new_session=True, **options)


def detach(process: subprocess.Popen) -> None:
    """Let the process outlive this one."""
    assert process.stdin
    process.stdin.write(DETACH)
    process.stdin.close()


def _watch_parent() -> None:
    if os.read(0, 1) == DETACH:
        return
    os.killpg(0, signal.SIGKILL)
    os._exit(1)  # process 1 of a namespace ignores signals that it sends to itself


if __name__ == "__main__":
    threading.Thread(target=_watch_parent, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
