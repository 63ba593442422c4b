"""Files, addresses and times that the watchdog shares with other modules."""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

LEASE = Path("/run/lease/renewed")
LAUNCHED = Path("/var/lib/launched")
"""Created at the first boot. It survives a reboot."""
BLOCK_END = Path("/var/lib/block-end")
"""In a Capacity Block: the time at which it ends, in ISO 8601.

The launch writes it (see launcher_file.py). It survives a reboot.
"""
BLOCK_CLEANUP_S = 30 * 60
"""AWS starts to terminate the instances of a Capacity Block this many seconds before its end."""
BLOCK_NOTICE_S = 10 * 60
"""The watchdog drains them this many seconds earlier, when AWS sends its own warning, as an EventBridge event."""
RAY_CONFIG = Path("~/ray_bootstrap_config.yaml").expanduser()
"""The configuration that the autoscaler rereads in each iteration of its loop. Ray writes it as JSON."""
STATE_FILE = Path("~/watchdog.json").expanduser()
"""The state that the head's watchdog saves for `inv status`, and for its next start."""
STATE_WITHOUT_DISK = LEASE.with_name(STATE_FILE.name)
"""The same, in memory. The watchdog saves its state here while the disk is full."""
LOG_FILE = Path("~/watchdog.log").expanduser()
GCS_PORT = 6379
DASHBOARD_PORT = 8265
INTERVAL_S = 5.0
SILENT_S = 120.0
"""A watchdog that has not saved its state for this long is considered dead. Its calls to AWS take seconds, or
a minute if AWS does not answer."""


def read_json(file: Path) -> Any:
    """Return the value of a JSON file that this node wrote, or None if it is missing or damaged, as after a crash."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(file.read_bytes())
    return None


def read_watchdog() -> dict[str, Any]:
    """Return the last state that the watchdog has saved, or {} if there is none or it is damaged."""
    found = [one for one in map(read_json, (STATE_FILE, STATE_WITHOUT_DISK)) if isinstance(one, dict) and "at" in one]
    return max(found, key=lambda one: one["at"], default={})


def answers(head: str) -> bool:
    """Return whether the head's control store (GCS) accepts connections."""
    try:
        socket.create_connection((head, GCS_PORT), timeout=3).close()
    except OSError:
        return False
    return True
