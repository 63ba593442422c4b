"""The watchdog on a worker, which renews the lease and drains the node before AWS takes the machine back."""

import datetime
import json
import socket
import subprocess
import time

from cluster.node import metadata, notices
from cluster.node.state import BLOCK_CLEANUP_S, BLOCK_END, BLOCK_NOTICE_S, GCS_PORT, INTERVAL_S, LEASE, answers


def watch(head: str) -> None:
    """Renew the lease while the head answers, and drain this node before AWS takes it back. Never returns."""
    drained = False
    while True:
        if answers(head):
            LEASE.touch()
        if not drained and (notice := spot_notice() or block_notice()):
            drained = drain(head, notice)
            if drained:
                notices.send(f"AWS takes {socket.gethostname()} back at {notice}. Training saves a checkpoint first")
        time.sleep(INTERVAL_S)


def spot_notice() -> str | None:
    """Return the time at which AWS will take this machine back, in ISO 8601, or None if there is no notice."""
    try:
        return json.loads(metadata.read("spot/instance-action"))["time"]
    except OSError:
        return None  # 404: no notice


def block_notice() -> str | None:
    """Return when AWS will take this machine back because its Capacity Block ends, or None if that is not soon."""
    if not BLOCK_END.exists():
        return None
    end = datetime.datetime.fromisoformat(BLOCK_END.read_text().strip())
    cleanup = end - datetime.timedelta(seconds=BLOCK_CLEANUP_S)
    seconds_left = cleanup.timestamp() - time.time()
    return cleanup.isoformat() if seconds_left <= BLOCK_NOTICE_S else None


def drain(head: str, notice: str) -> bool:
    """Tell Ray to place no new work on this node. Return whether Ray accepted that."""
    seconds = datetime.datetime.fromisoformat(notice).timestamp() - time.time()
    command = ["ray", "drain-node", "--address", f"{head}:{GCS_PORT}", "--node-id", own_node_id(head)]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", str(max(0, int(seconds)))]
    command += ["--reason-message", f"AWS takes this machine back at {notice}"]
    return subprocess.run(command, check=False).returncode == 0


def own_node_id(head: str) -> str:
    """Return Ray's id of this node."""
    from pipeline.ray_support.private import gcs  # importing Ray takes memory, and only this function needs Ray

    with socket.create_connection((head, GCS_PORT)) as connection:
        address = connection.getsockname()[0]
    return gcs.node_id(f"{head}:{GCS_PORT}", address)
