"""Runs on the head, sent there over ssh: what Ray's autoscaler tells nobody else, as one line of JSON.

Nothing of this project is imported: the head knows only what cluster.yaml installed.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from ray.autoscaler.v2.sdk import get_cluster_status

LOGS = Path("/tmp/ray/session_latest/logs")
TAIL = 400_000  # bytes of monitor.out to look at: some hundred launches


def report() -> dict:
    """The autoscaler's state: whether it runs, what it waits for, what it was refused, what failed on new nodes."""
    status = get_cluster_status("127.0.0.1:6379")
    return {
        "autoscaler": _autoscaler_pid(),
        "reported": status.stats.autoscaler_version is not None,
        "last_words": _tail(LOGS / "monitor.err", 2_000) or _tail(LOGS / "monitor.log", 2_000),
        "nodes": [
            {"instance": node.instance_id, "type": node.ray_node_type_name, "address": node.ip_address}
            for node in [*status.active_nodes, *status.idle_nodes]
        ],
        "pending": [
            {"instance": node.instance_id, "type": node.ray_node_type_name, "details": node.details}
            for node in status.pending_nodes
        ]
        + [
            {"instance": "", "type": launch.ray_node_type_name, "count": launch.count, "details": launch.details}
            for launch in status.pending_launches
        ],
        "refused": [
            {"type": launch.ray_node_type_name, "at": launch.failed_ts_s, "details": launch.details}
            for launch in status.failed_launches
        ],
        "demands": [
            {"resources": dict(bundle.bundle), "count": bundle.count}
            for demand in (
                *status.resource_demands.ray_task_actor_demand,
                *status.resource_demands.placement_group_demand,
            )
            for bundle in demand.bundles_by_count
        ],
        "failed_setups": _failed_setups(_tail(LOGS / "monitor.out", TAIL)),
    }


def _autoscaler_pid() -> int:
    found = subprocess.run(["pgrep", "-f", "autoscaler/v2/monitor.py"], capture_output=True, text=True).stdout.split()
    return int(found[0]) if found else 0


def _failed_setups(text: str) -> list[str]:
    """What went wrong on new nodes, with the last lines of the command that failed; oldest first.

    monitor.out holds the output of all nodes' commands, between lines of Ray's own that begin with a date.
    """
    failures: dict[str, str] = {}
    words: list[str] = []
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        if found := re.search(r"NodeUpdater: (i-\w+): (\w[\w ]*) failed", line):
            # Ray tries again on the same node: the last time counts
            failures.pop(found[1], None)
            failures[found[1]] = f"{found[1]}: {found[2].lower()} failed: {' / '.join(words[-3:]) or 'no output'}"
            words = []
        elif line.strip() and not re.match(r"\d{4}-\d\d-\d\d", line):
            words.append(line.strip()[:200])
    return list(failures.values())


def _tail(file: Path, size: int) -> str:
    if not file.exists():
        return ""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - size))
        return opened.read().decode(errors="replace").strip()


if __name__ == "__main__":
    json.dump(report(), sys.stdout)
