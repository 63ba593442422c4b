"""Files and addresses that the watchdog and the head's report share."""

import socket
from pathlib import Path

LEASE = Path("/run/lease/renewed")
RAY_CONFIG = Path("~/ray_bootstrap_config.yaml").expanduser()
"""The autoscaler's configuration, which it rereads in each iteration of its loop. Ray writes it as JSON."""
STATE_FILE = Path("~/watchdog.json").expanduser()
"""What the head's watchdog has done, for `inv status`."""
LOG_FILE = Path("~/watchdog.log").expanduser()
PID_FILE = Path("~/watchdog.pid").expanduser()
GCS_PORT = 6379
INTERVAL_S = 5.0
SILENT_S = 60.0
"""A watchdog that has not written its state for this long is not running: it waits for AWS for seconds at most."""


def answers(head: str) -> bool:
    """Return whether the head's control store (GCS) accepts connections."""
    try:
        socket.create_connection((head, GCS_PORT), timeout=3).close()
    except OSError:
        return False
    return True
