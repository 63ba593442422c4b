"""Print the status of the head's autoscaler and watchdog as one line of JSON. Runs on the head."""

import json
import subprocess
import sys
import time

from raymill.node import autoscaler_log, disk_use, state
from raymill.node.autoscaler_log import LOGS, tail
from raymill.ray_support.private.core import cluster_status


def head_status() -> dict:
    """Return the state of the nodes, the autoscaler and the watchdog, refused launches, and failed setups."""
    if not state.answers("127.0.0.1"):  # Ray's own client would retry for a minute
        sys.exit("Ray is not running on this head")
    ray_status = cluster_status(f"127.0.0.1:{state.GCS_PORT}")
    return {
        "at": time.time(),
        "session": LOGS.resolve().parent.name,
        "autoscaler": _autoscaler_pid(),
        "reported": ray_status.stats.autoscaler_version is not None,
        "log_tail": {
            "autoscaler": tail(LOGS / "monitor.err", 2_000) or tail(LOGS / "monitor.log", 2_000),
            "watchdog": tail(state.LOG_FILE, 2_000),
        },
        "nodes": [
            {"instance": node.instance_id, "type": node.ray_node_type_name, "address": node.ip_address}
            for node in [*ray_status.active_nodes, *ray_status.idle_nodes]
        ],
        "pending": [
            {"type": node.ray_node_type_name, "count": 1, "details": node.details} for node in ray_status.pending_nodes
        ]
        + [
            {"type": launch.ray_node_type_name, "count": launch.count, "details": launch.details}
            for launch in ray_status.pending_launches
        ],
        "refused": list({refusal["type"]: refusal for refusal in autoscaler_log.recent_refusals()}.values()),
        "demands": [
            {"resources": dict(bundle.bundle), "count": bundle.count}
            for demand in (
                *ray_status.resource_demands.ray_task_actor_demand,
                *ray_status.resource_demands.placement_group_demand,
            )
            for bundle in demand.bundles_by_count
        ],
        "failed_setups": autoscaler_log.failed_setups(tail(LOGS / "monitor.out"), tail(LOGS / "monitor.log")),
        "watchdog": _watchdog(),
        "disk": disk_use.problem(),
    }


def _watchdog() -> dict:
    """Return the watchdog's saved state. `runs` says whether the watchdog still runs, judged by the state's age."""
    written = state.read_watchdog() or {"at": 0}
    return written | {"runs": time.time() - written["at"] < state.SILENT_S}


def _autoscaler_pid() -> int:
    found = subprocess.run(["pgrep", "-f", "autoscaler/v2/monitor.py"], capture_output=True, text=True).stdout.split()
    return int(found[0]) if found else 0


if __name__ == "__main__":
    json.dump(head_status(), sys.stdout)
