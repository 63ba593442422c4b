"""The watchdog on a worker, which renews the lease and drains the node before AWS takes the machine back."""

import datetime
import json
import logging
import socket
import subprocess
import time

from raymill.node import metadata, notices
from raymill.node.state import BLOCK_CLEANUP_S, BLOCK_END, BLOCK_NOTICE_S, GCS_PORT, INTERVAL_S, LEASE, answers

log = logging.getLogger(__name__)
STOP_SERVING_S = 30.0
"""Seconds before AWS takes the machine back at which a replica that has no successor yet stops taking requests."""
POSTPONED_S = 2 * 3600.0
"""Seconds by which Ray is first told a later deadline. More than any replica may take to stop."""


def watch(head: str) -> None:
    """Renew the lease while the head answers, and drain this node before AWS takes it back. Never returns.

    Serve stops a replica as soon as the time to the node's deadline is less than the replica may take to stop, which
    is more than a notice's two minutes. If it is the only replica, nobody would answer until another machine is up.
    So Ray is first told a later deadline, and the real one STOP_SERVING_S before the end.
    """
    drained = is_final = False
    while True:
        if answers(head):
            LEASE.touch()
        if not is_final and (notice := spot_notice() or block_notice()):
            seconds = max(0.0, datetime.datetime.fromisoformat(notice).timestamp() - time.time())
            if seconds <= STOP_SERVING_S:
                newly_drained = is_final = drain(head, notice, seconds)
            else:
                newly_drained = not drained and drain(head, notice, seconds + POSTPONED_S)
            if newly_drained and not drained:
                drained = True
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


def drain(head: str, notice: str, deadline_s: float) -> bool:
    """Tell Ray to place no new work on this node, which ends in `deadline_s` seconds. Return whether Ray does."""
    command = ["ray", "drain-node", "--address", f"{head}:{GCS_PORT}", "--node-id", own_node_id(head)]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", str(int(deadline_s))]
    command += ["--reason-message", f"AWS takes this machine back at {notice}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    log.warning("ray drain-node: %s", done.stdout.strip())  # `ray` itself would fail to print it to a full disk
    return done.returncode == 0


def own_node_id(head: str) -> str:
    """Return Ray's id of this node."""
    from raymill.ray_support.private import core  # importing Ray takes memory, and only this function needs Ray

    with socket.create_connection((head, GCS_PORT)) as connection:
        address = connection.getsockname()[0]
    return core.node_id(f"{head}:{GCS_PORT}", address)
