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

import settings
from cluster.common import bucket, cluster_file, instances, prices
from cluster.common.cluster_file import ClusterFile
from cluster.node import autoscaler_log, notices
from cluster.node.state import INTERVAL_S, LAUNCHED, LEASE, RAY_CONFIG, STATE_FILE

CLOSED_S = 300.0
"""How long a node type stays closed after AWS refuses it."""
REQUEST_TIMEOUT_S = 120.0
"""How long the autoscaler waits for a launched instance to appear (see cluster.yaml). If its type were closed before,
the autoscaler would fail in each of its loops, because it cannot withdraw such a request."""
MAX_FAILED_SETUPS = 3
THROTTLED = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException")
"""Codes with which AWS refuses a call because there are too many. They say nothing about capacity."""


class LimitsSection(settings.Section):
    """[cluster.limits] of settings.toml."""

    hours: float
    """The cluster shuts itself down this many hours after the launch of its head."""
    dollars: float
    """The cluster shuts itself down when its instances have cost this much. Disks and traffic do not count."""


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

    def add(self, running: Counter[str], seconds: float) -> None:
        """Add the cost of all running instances for `seconds`."""
        hourly = sum(count * self.hourly.get(node_type, 0.0) for node_type, count in running.items())
        self.dollars += hourly * seconds / 3600


def watch() -> None:
    """Renew the lease, close refused and failing node types, and enforce the limits. Never returns."""
    limits = settings.load(LimitsSection, "limits", profile="cluster")
    file = cluster_file.load()
    renew_lease_within(limits, file)  # before asking AWS: if AWS does not answer, the lease must not expire
    known = prices.ask(file)
    state = json.loads(STATE_FILE.read_text()) if STATE_FILE.exists() else {}
    markets = Markets({worker.name: worker.max_workers for worker in file.workers})
    spending = Spending({file.head.name: known.head, **known.workers}, state.get("dollars", 0.0))
    messages, last = state.get("messages", []), state.get("at", time.time())
    while True:
        renew_lease_within(limits, file)
        running, now = Counter(one.node_type for one in instances.living(file)), time.time()
        spending.add(running, now - last)
        last = now
        news = markets.note_refusals([*autoscaler_log.recent_refusals(), *_failed_launches(file)], now)
        failed_setups = markets.note_failed_setups(autoscaler_log.failed_setups_by_type())
        for message in failed_setups:
            notices.send(message)
        news += failed_setups
        write_limits(markets.limits(running, now))
        messages = [*messages, *(f"{time.strftime('%H:%M:%S')} {message}" for message in news)][-20:]
        STATE_FILE.write_text(json.dumps({"at": now, "dollars": spending.dollars, "messages": messages}))
        if spending.dollars >= limits.dollars:
            end_cluster(file, f"the limit of {limits.dollars:g} dollars in settings.toml is reached")
        time.sleep(INTERVAL_S)


def _failed_launches(file: ClusterFile) -> list[dict[str, str]]:
    """Return the launches that EC2 accepted and then ended, in the form of `autoscaler_log.refusals`.

    They count as refused when the autoscaler has given them up.
    """
    given_up = datetime.timedelta(seconds=REQUEST_TIMEOUT_S)
    return [
        {
            "type": one.node_type,
            "at": (one.launched + given_up).isoformat(),
            "code": one.end_code,
            "message": one.end_reason,
        }
        for one in instances.failed_launches(file)
        if one.age_s > REQUEST_TIMEOUT_S
    ]


def renew_lease_within(limits: LimitsSection, file: ClusterFile) -> None:
    """Renew the head's lease, or terminate the cluster if it has run for `limits.hours`.

    The hours count from the first boot, so a reboot does not extend them.
    """
    if time.time() - LAUNCHED.stat().st_mtime >= limits.hours * 3600:
        end_cluster(file, f"the limit of {limits.hours:g} hours in settings.toml is reached")
    LEASE.touch()


def write_limits(max_workers: dict[str, int]) -> None:
    """Change max_workers of each type in the configuration of the running autoscaler."""
    config = json.loads(RAY_CONFIG.read_text())
    types = config["available_node_types"]
    changed = [name for name, limit in max_workers.items() if types[name].get("max_workers") != limit]
    for name in changed:
        types[name]["max_workers"] = max_workers[name]
    if changed:
        partial = RAY_CONFIG.with_suffix(".partial")
        partial.write_text(json.dumps(config))
        partial.replace(RAY_CONFIG)  # so that the autoscaler never reads half a file


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


def _seconds(log_time: str) -> float:
    """Convert a time to seconds since the epoch. Times in Ray's logs name no zone, and are in this machine's."""
    return datetime.datetime.fromisoformat(log_time).timestamp()
