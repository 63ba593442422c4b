"""Records how busy this node's GPUs are, for log_shipping.py, and sends a notice if they are idle."""

import datetime
import re
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from cluster.common.cluster_file import TARGET
from cluster.node import notices

FILE = Path("~/gpu_use.csv").expanduser()
INTERVAL_S = 60.0
BUSY_PERCENT = 10
IDLE_SAMPLES = 15
HEADER = "time,gpu,busy_percent,memory_used_mib,memory_total_mib\n"
QUERY = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
LINE = re.compile(r"\d+(, \d+){3}")
"""A GPU's line in the answer to QUERY."""


def record() -> None:
    """Add a line for each GPU to the table every minute, and send a notice if the GPUs are idle. Never returns."""
    idle = Idle()
    while True:
        if lines := sample():
            with FILE.open("a") as table:
                table.write(("" if table.tell() else HEADER) + "".join(f"{line}\n" for line in lines))
            if idle.begins([int(line.split(",")[2]) for line in lines]):
                notices.send(
                    f"for {IDLE_SAMPLES} minutes, no GPU of {socket.gethostname()} has been busy for more than "
                    f"{BUSY_PERCENT} % of the time. To see what runs: inv status --target {TARGET}"
                )
        time.sleep(INTERVAL_S)


class Idle:
    """Finds when the GPUs of this machine have been idle for IDLE_SAMPLES samples."""

    def __init__(self) -> None:
        self._samples = 0

    def begins(self, busy_percent: Iterable[int]) -> bool:
        """Count one sample, and return whether it is the one at which the GPUs count as idle."""
        self._samples = 0 if any(percent > BUSY_PERCENT for percent in busy_percent) else self._samples + 1
        return self._samples == IDLE_SAMPLES


def sample() -> list[str]:
    """Return the current line of each GPU, or [] if nvidia-smi finds none."""
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return [f"{now},{line.replace(', ', ',')}" for line in answer.splitlines() if LINE.fullmatch(line)]
