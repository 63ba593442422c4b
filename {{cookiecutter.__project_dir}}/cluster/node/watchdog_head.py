"""The watchdog on the head, which closes node types, enforces the limits and renews the lease.

If AWS refuses a node type, Ray's autoscaler retries that type forever. So the watchdog closes the type for a few
minutes: it lowers max_workers to the number of the type's running instances, and the autoscaler tries the next type.
"""

import datetime
import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.common import bucket, cluster_file, instances, limits, prices
from cluster.common.cluster_file import ClusterFile
from cluster.common.limits import LimitsSection
from cluster.node import autoscaler_log, notices
from cluster.node.state import INTERVAL_S, LAUNCHED, LEASE, RAY_CONFIG, STATE_FILE

CLOSED_S = 300.0
"""How long a node type stays closed after AWS refuses it."""
MAX_FAILED_SETUPS = 3
THROTTLED = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException")
"""Codes with which AWS refuses a call because there are too many. They say nothing about capacity."""


@dataclass
class Markets:
    """Which node types the autoscaler may request."""

    max_workers: dict[str, int]
    """max_workers of each type in cluster.yaml."""
    closed_until: dict[str, float] = field(default_factory=dict)
    """When each closed node type reopens, in seconds since the epoch. Infinity if its setup keeps failing."""

    def note_refusals(self, refusals: Iterable[Mapping[str, str]], now: float) -> list[str]:
        """Close each refused node type (see autoscaler_log.py) for CLOSED_S seconds. Return messages for the user."""
        messages = []
        for refusal in (one for one in refusals if one["code"] not in THROTTLED):
            node_type = refusal["type"]
            closed, until = self.closed_until.get(node_type, 0), _seconds(refusal["at"]) + CLOSED_S
            if closed <= now < until:  # only one message, although Ray retries until it sees the new limit
                pause = f"not requested again for {CLOSED_S / 60:.0f} minutes"
                messages.append(f"AWS refused {node_type} ({refusal['code']}): {pause}")
            self.closed_until[node_type] = max(closed, until)
        return messages

    def note_failed_setups(self, failures: Counter[str]) -> list[str]:
        """Close a type for good after its third failed setup. Return messages for the user."""
        messages = []
        for node_type, count in failures.items():
            if count >= MAX_FAILED_SETUPS and self.closed_until.get(node_type) != float("inf"):
                self.closed_until[node_type] = float("inf")
                messages.append(
                    f"the setup of {count} {node_type} instances failed, so no more are started until you correct "
                    "setup_commands in cluster/cluster.yaml and run `inv up` again"
                )
        return messages

    def limits(self, running: Counter[str], now: float) -> dict[str, int]:
        """Return the current max_workers of each type.

        For a closed type, this is the number of running instances, because Ray terminates instances above the limit.
        """
        return {
            node_type: running[node_type] if self.closed_until.get(node_type, 0) > now else maximum
            for node_type, maximum in self.max_workers.items()
        }


@dataclass
class Spending:
    """What the instances have cost so far."""

    hourly: dict[str, float]
    """Dollars per hour of one instance, by node type."""
    dollars: float

    def add(self, running: Counter[str], seconds: float) -> float:
        """Add the cost of all running instances for `seconds`. Return what they cost per hour."""
        hourly = sum(count * self.hourly.get(node_type, 0.0) for node_type, count in running.items())
        self.dollars += hourly * seconds / 3600
        return hourly


def watch() -> None:
    """Renew the lease, close refused and failing node types, and enforce the limits. Never returns."""
    file = cluster_file.load()
    renew_lease_within(limits.load(), file)  # before asking AWS: if AWS does not answer, the lease must not expire
    known = prices.ask(file)
    state = json.loads(STATE_FILE.read_text()) if STATE_FILE.exists() else {}
    markets = Markets({worker.name: worker.max_workers for worker in file.workers})
    spending = Spending({file.head.name: known.head, **known.workers}, state.get("dollars", 0.0))
    messages, last = state.get("messages", []), state.get("at", time.time())
    while True:
        current = limits.load()  # again, because `inv limits` changes them
        renew_lease_within(current, file)
        running, now = Counter(one.node_type for one in instances.living(file)), time.time()
        hourly = spending.add(running, now - last)
        last = now
        news = markets.note_refusals(autoscaler_log.recent_refusals(), now)
        failed_setups = markets.note_failed_setups(autoscaler_log.failed_setups_by_type())
        for message in failed_setups:
            notices.send(message)
        news += failed_setups
        write_limits(markets.limits(running, now))
        messages = [*messages, *(f"{time.strftime('%H:%M:%S')} {message}" for message in news)][-20:]
        used = {"hours": hours_used(), "dollars": spending.dollars, "dollars_per_hour": hourly}
        _replace(STATE_FILE, json.dumps({"at": now, "limits": current.model_dump(), **used, "messages": messages}))
        if spending.dollars >= current.dollars:
            end_cluster(file, f"the limit of {current.dollars:g} dollars in settings.toml is reached")
        time.sleep(INTERVAL_S)


def renew_lease_within(current: LimitsSection, file: ClusterFile) -> None:
    """Renew the head's lease, or terminate the cluster if it has run for `current.hours`."""
    if hours_used() >= current.hours:
        end_cluster(file, f"the limit of {current.hours:g} hours in settings.toml is reached")
    LEASE.touch()


def hours_used() -> float:
    """Return the hours since the first boot, so a reboot does not extend them."""
    return (time.time() - LAUNCHED.stat().st_mtime) / 3600


def write_limits(max_workers: dict[str, int]) -> None:
    """Change max_workers of each type in the configuration of the running autoscaler."""
    config = json.loads(RAY_CONFIG.read_text())
    types = config["available_node_types"]
    changed = [name for name, limit in max_workers.items() if types[name].get("max_workers") != limit]
    for name in changed:
        types[name]["max_workers"] = max_workers[name]
    if changed:
        _replace(RAY_CONFIG, json.dumps(config))


def end_cluster(file: ClusterFile, reason: str) -> None:
    """Terminate all workers, then this machine. A worker that survives shuts down when its lease expires."""
    print(reason, flush=True)
    write_limits({worker.name: 0 for worker in file.workers})  # otherwise the autoscaler would replace the workers
    try:
        if workers := [one.id for one in instances.living(file) if one.node_type != file.head.name]:
            instances.terminate(file, workers)
        bucket.leave_note(file, reason)
        notices.send(f"the cluster shuts itself down: {reason}")
    finally:
        subprocess.run(["sudo", "shutdown", "-h", "now"], check=True)
        time.sleep(60)  # the shutdown takes effect within this time


def _replace(file: Path, text: str) -> None:
    """Replace the file's text at once, so that no reader sees half of it."""
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(file)


def _seconds(log_time: str) -> float:
    """Convert a time in Ray's logs, which is in this machine's time zone, to seconds since the epoch."""
    return datetime.datetime.fromisoformat(log_time).timestamp()
