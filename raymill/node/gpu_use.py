"""Records how busy this node's GPUs are, for log_shipping.py, and sends a notice if they are idle."""

import datetime
import json
import logging
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raymill import state_files
from raymill.common.cluster_file import target
from raymill.node import notices, state

log = logging.getLogger(__name__)
FILE = Path("~/gpu_use.csv").expanduser()
LAST_FILE = Path("~/gpu_use.json").expanduser()
"""The last `GpuUse` of each GPU."""
INTERVAL_S = 60.0
BUSY_PERCENT = 10
IDLE_SAMPLES = 15
HEADER = "time,gpu,busy_percent,memory_used_mib,memory_total_mib\n"
QUERY = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
LINE = re.compile(r"\d+(, \d+){3}")
"""A GPU's line in the answer to QUERY."""
TABLE_LINE = re.compile(r"[^,]+(,\d+){4}")
"""A line of the table, except its header."""


@dataclass(frozen=True)
class GpuUse:
    """How busy a GPU was at one time."""

    time: str
    """In ISO 8601."""
    gpu: int
    busy_percent: int
    memory_used_mib: int
    memory_total_mib: int
    idle_samples: int = 0
    """How many samples in a row up to this one showed the GPU idle. The table does not have this."""

    @property
    def seconds(self) -> float:
        """The time in seconds since 1970."""
        return datetime.datetime.fromisoformat(self.time).timestamp()


def record() -> None:
    """Add a line for each GPU to the table every minute, and send a notice if the GPUs are idle. Never returns."""
    idle: dict[int, int] = {}
    while True:
        if lines := sample():
            uses = list(read(lines))
            idle = {one.gpu: idle.get(one.gpu, 0) + 1 if one.busy_percent <= BUSY_PERCENT else 0 for one in uses}
            if min(idle.values()) == IDLE_SAMPLES:
                notices.send(
                    f"for {IDLE_SAMPLES} minutes, no GPU of {socket.gethostname()} has been busy for more than "
                    f"{BUSY_PERCENT} % of the time. To see what runs: inv status --target {target()}"
                )
            try:
                _save(lines, [asdict(one) | {"idle_samples": idle[one.gpu]} for one in uses])
            except OSError as error:  # for example, because the disk is full
                log.warning("the use of the GPUs was not saved: %s", error)
        time.sleep(INTERVAL_S)


def _save(lines: list[str], uses: list[dict[str, Any]]) -> None:
    with FILE.open("a") as table:
        table.write(("" if table.tell() else HEADER) + "".join(f"{line}\n" for line in lines))
    state_files.replace(LAST_FILE, json.dumps(uses))


def last() -> list[dict[str, Any]]:
    """Return the last sample of each GPU, or [] if there is none."""
    return state.read_json(LAST_FILE) or []


def read(lines: Iterable[str]) -> Iterator[GpuUse]:
    """Yield what the lines of the table say, except its header."""
    for line in lines:
        if TABLE_LINE.fullmatch(line):
            at, *numbers = line.split(",")
            yield GpuUse(at, *map(int, numbers))


def sample() -> list[str]:
    """Return the current line of each GPU, or [] if nvidia-smi finds none."""
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return [f"{now},{line.replace(', ', ',')}" for line in answer.splitlines() if LINE.fullmatch(line)]
