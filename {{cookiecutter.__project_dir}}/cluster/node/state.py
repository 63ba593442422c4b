"""Files and addresses that the watchdog shares with head_status.py."""

import socket
from pathlib import Path

LEASE = Path("/run/lease/renewed")
RAY_CONFIG = Path("~/ray_bootstrap_config.yaml").expanduser()
"""The configuration that the autoscaler rereads in each iteration of its loop. Ray writes it as JSON."""
STATE_FILE = Path("~/watchdog.json").expanduser()
"""The state that the head's watchdog saves for `inv status`."""
LOG_FILE = Path("~/watchdog.log").expanduser()
PID_FILE = Path("~/watchdog.pid").expanduser()
GCS_PORT = 6379
INTERVAL_S = 5.0
SILENT_S = 60.0
"""A watchdog that has not saved its state for this long is considered dead. Its calls to AWS take only seconds."""


def answers(head: str) -> bool:
    """Return whether the head's control store (GCS) accepts connections."""
    try:
        socket.create_connection((head, GCS_PORT), timeout=3).close()
    except OSError:
        return False
    return True
