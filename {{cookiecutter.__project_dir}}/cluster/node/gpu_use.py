"""Records how busy this node's GPUs are. log_shipping.py copies the table to the bucket."""

import datetime
import re
import subprocess
import time
from pathlib import Path

FILE = Path("~/gpu_use.csv").expanduser()
INTERVAL_S = 60.0
HEADER = "time,gpu,busy_percent,memory_used_mib,memory_total_mib\n"
QUERY = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
LINE = re.compile(r"\d+(, \d+){3}")
"""A GPU's line in the answer to QUERY."""


def record() -> None:
    """Add a line for each GPU to the table every minute. Never returns."""
    while True:
        if lines := sample():
            with FILE.open("a") as table:
                table.write(("" if table.tell() else HEADER) + "".join(f"{line}\n" for line in lines))
        time.sleep(INTERVAL_S)


def sample() -> list[str]:
    """Return the current line of each GPU, or [] if nvidia-smi finds none."""
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return [f"{now},{line.replace(', ', ',')}" for line in answer.splitlines() if LINE.fullmatch(line)]
