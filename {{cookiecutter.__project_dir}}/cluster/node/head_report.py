"""Runs on the head: what Ray's autoscaler and the steward tell nobody else, as one line of JSON."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from cluster.node import watchdog

LOGS = Path("/tmp/ray/session_latest/logs")
TAIL = 400_000  # bytes of monitor.out to look at: some hundred launches


def report() -> dict:
    """The autoscaler's state: whether it runs, what it waits for, what it was refused, what failed on new nodes."""
    from ray.autoscaler.v2.sdk import get_cluster_status  # here: the steward, which reads the logs, is small

    if not watchdog.answers("127.0.0.1"):  # asked here, as Ray's client would try for a minute
        sys.exit("Ray does not run on this head")
    status = get_cluster_status(f"127.0.0.1:{watchdog.GCS_PORT}")
    return {
        "autoscaler": _autoscaler_pid(),
        "reported": status.stats.autoscaler_version is not None,
        "last_words": {
            "autoscaler": _tail(LOGS / "monitor.err", 2_000) or _tail(LOGS / "monitor.log", 2_000),
            "steward": _tail(watchdog.LOG, 2_000),
        },
        "nodes": [
            {"instance": node.instance_id, "type": node.ray_node_type_name, "address": node.ip_address}
            for node in [*status.active_nodes, *status.idle_nodes]
        ],
        "pending": [
            {"type": node.ray_node_type_name, "count": 1, "details": node.details} for node in status.pending_nodes
        ]
        + [
            {"type": launch.ray_node_type_name, "count": launch.count, "details": launch.details}
            for launch in status.pending_launches
        ],
        "refused": list({refusal["type"]: refusal for refusal in recent_refusals()}.values()),
        "demands": [
            {"resources": dict(bundle.bundle), "count": bundle.count}
            for demand in (
                *status.resource_demands.ray_task_actor_demand,
                *status.resource_demands.placement_group_demand,
            )
            for bundle in demand.bundles_by_count
        ],
        "failed_setups": failed_setups(_tail(LOGS / "monitor.out", TAIL), _tail(LOGS / "monitor.log", TAIL)),
        "steward": _steward(),
    }


def _steward() -> dict:
    """What it noted last, and whether it `runs`: then that was just now."""
    noted = json.loads(watchdog.SAID.read_text()) if watchdog.SAID.exists() else {"at": 0}
    return noted | {"runs": time.time() - noted["at"] < watchdog.SILENT_S}


def _autoscaler_pid() -> int:
    found = subprocess.run(["pgrep", "-f", "autoscaler/v2/monitor.py"], capture_output=True, text=True).stdout.split()
    return int(found[0]) if found else 0


def failed_setups(text: str, log: str) -> list[str]:
    """What went wrong on new nodes, with the last lines of the command that failed; oldest first.

    monitor.out, the text, holds the output of all nodes' commands, between lines of Ray's own that begin with a date.
    monitor.log tells which nodes the autoscaler ended before they were ready: their commands did not fail.
    """
    not_needed = re.findall(r"RAY_INSTALLING->TERMINATING \(.*cloud_instance_id=(i-\w+)", log)
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
    return [words for instance, words in failures.items() if instance not in not_needed]


def refusals(text: str) -> list[dict[str, str]]:
    """Launches that AWS refused, oldest first: `type`, `at` (the head's clock), AWS's `code` and `words`.

    monitor.log alone has them: what the autoscaler reports names no reason.
    """
    line = r"(\S+ [\d:]+),\d+.*Failed to launch \d+ nodes of type (\S+): Node Launch Exception \((\w+)\): (.*)"
    return [dict(zip(("at", "type", "code", "words"), found, strict=True)) for found in re.findall(line, text)]


def recent_refusals() -> list[dict[str, str]]:
    """Those that this session of Ray knows of."""
    return refusals(_tail(LOGS / "monitor.log", TAIL))


def failed_setups_by_type() -> Counter[str]:
    """How many machines of each node type failed in their set-up since Ray started."""
    return Counter(re.findall(r"->RAY_INSTALL_FAILED \(id=[\w-]+, type=([\w.-]+),", _tail(LOGS / "monitor.log", TAIL)))


def _tail(file: Path, size: int) -> str:
    if not file.exists():
        return ""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - size))
        return opened.read().decode(errors="replace").strip()


if __name__ == "__main__":
    json.dump(report(), sys.stdout)
