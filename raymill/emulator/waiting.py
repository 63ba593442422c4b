"""Wait for the emulated cluster, with longer timeouts on a slow machine."""

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from raymill.errors import UserError

USUAL_IMPORT_S = 0.6  # `import ray` on two idle cores
MAX_SLOWDOWN = 5.0  # a cluster that needs even more time is considered broken


@functools.cache
def slowdown() -> float:
    """Return by what factor importing Ray takes longer than usual on this machine, from 1 to 5."""
    for _ in range(2):  # only the second run counts, because the first may read Ray from the disk
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", "import ray"], check=True)
    return min(max(1.0, (time.monotonic() - started) / USUAL_IMPORT_S), MAX_SLOWDOWN)


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> float:
    """Wait until the condition holds, and return the seconds that it took.

    `timeout_s` is the timeout on a machine with the usual speed. It is multiplied by `slowdown()`. `what` names the
    condition in the error.

    Raises:
        UserError: the condition did not hold in time.
    """
    started, timeout_s = time.monotonic(), timeout_s * slowdown()
    while not condition():
        if time.monotonic() >= started + timeout_s:
            raise UserError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(1)
    return time.monotonic() - started
