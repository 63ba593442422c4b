"""The watchdog on the head, which closes node types, enforces the limits and renews the lease.

If AWS refuses a node type, Ray's autoscaler retries that type forever. So the watchdog closes the type for a few
minutes: it lowers max_workers to the number of the type's running instances, and the autoscaler tries the next type.
"""

import datetime
import json
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

import settings
from cluster.common import bucket, cluster_file, instances, limits, prices
from cluster.common.cluster_file import ClusterFile
from cluster.common.instances import Instance
from cluster.common.limits import LimitsSection
from cluster.node import autoscaler_log, notices
from cluster.node.activity import Activity
from cluster.node.state import INTERVAL_S, LAUNCHED, LEASE, RAY_CONFIG, STATE_FILE, read_json

PRICES_S = 3600.0
"""How often the prices are read again. Spot prices change slowly."""
CLOSED_S = 300.0
"""How long a node type stays closed after AWS refuses it."""
REQUEST_TIMEOUT_S = 120.0
"""How long the autoscaler waits for a launched instance to appear (see cluster.yaml). If its type were closed before,
the autoscaler would fail in each of its loops, because it cannot withdraw such a request."""
MAX_FAILED_SETUPS = 3
STARTED = time.time()
"""When this process started, which counts as use of the cluster, because `inv up` starts it."""
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
                    f"setup_commands in cluster/cluster.yaml and run again: inv up --target {cluster_file.TARGET}"
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


class Spending:
    """What the instances have cost so far."""

    def __init__(self, file: ClusterFile, dollars: float) -> None:
        self.dollars = dollars
        self._file = file
        self._prices: prices.MarketPrices | None = None
        self._types: set[str] = set()
        """The instance types that ran when AWS was last asked for prices."""
        self._asked = 0.0

    def add(self, running: Collection[Instance], seconds: float) -> float:
        """Add the cost of all running instances for `seconds`. Return what they cost per hour."""
        current = self._current_prices(running)
        hourly = sum(current.of(one) for one in running)
        self.dollars += hourly * seconds / 3600
        return hourly

    def _current_prices(self, running: Collection[Instance]) -> prices.MarketPrices:
        """Ask AWS every PRICES_S, and when another type runs. If that fails, the last prices apply."""
        types = {one.instance_type for one in running}
        if self._prices and types <= self._types and time.monotonic() - self._asked < PRICES_S:
            return self._prices
        self._asked, self._types = time.monotonic(), types
        try:
            self._prices = prices.of_running(self._file, running)
        except (BotoCoreError, ClientError, settings.UserError) as error:
            if not self._prices:
                raise
            print(f"{time.strftime('%H:%M:%S')} the prices are unknown, so the last ones apply: {error}", flush=True)
        return self._prices


def watch() -> None:
    """Watch over the cluster. Never returns."""
    file = cluster_file.load()
    renew_lease_within(
        current_limits()[0], file
    )  # before asking AWS: if AWS does not answer, the lease must not expire
    watchdog = HeadWatchdog(file)
    while True:
        watchdog.check()
        time.sleep(INTERVAL_S)


class HeadWatchdog:
    """Renews the lease, closes refused and failing node types, and enforces the limits."""

    def __init__(self, file: ClusterFile) -> None:
        """Continue with the state that an earlier watchdog has saved."""
        state = read_json(STATE_FILE) or {}
        self._file = file
        self._markets = Markets({worker.name: worker.max_workers for worker in file.workers})
        self._spending = Spending(file, state.get("dollars", 0.0))
        self._activity = Activity(max(STARTED, state.get("last_use", 0.0)), state.get("requests", 0.0))
        self._messages = state.get("messages", [])
        if not state and STATE_FILE.exists():
            lost = f"{STATE_FILE} was damaged, so the limit in dollars counts only what is spent from now on"
            self._messages.append(f"{time.strftime('%H:%M:%S')} {lost}")
            notices.send(lost)
        self._last = state.get("at", time.time())
        self._warned_after = state.get("warned_after", 0.0)

    def check(self) -> None:
        """Check everything once, and save the state."""
        current, problem = current_limits()  # each time, because `inv limits` changes them
        if problem and not any(problem in message for message in self._messages):
            self._messages.append(f"{time.strftime('%H:%M:%S')} {problem}")
        renew_lease_within(current, self._file)
        living, now = instances.living(self._file), time.time()
        per_hour = self._spending.add(living, now - self._last)
        self._last = now
        self._close_node_types(Counter(one.node_type for one in living if one.state != "shutting-down"), now)
        self._activity.check(now)
        idle = (now - self._activity.last) / 3600
        warning = current.idle_warning(idle)
        if warning and self._warned_after != self._activity.last:
            self._warned_after = self._activity.last
            notices.send(warning)
        used = {"hours": hours_used(), "dollars": self._spending.dollars, "idle_hours": idle}
        state = {
            **{"at": now, "limits": current.model_dump(), **used, "dollars_per_hour": per_hour},
            **{"last_use": self._activity.last, "requests": self._activity.requests},
            **{"idle_warning": warning, "warned_after": self._warned_after, "messages": self._messages},
        }
        _replace(STATE_FILE, json.dumps(state))
        if self._spending.dollars >= current.dollars:
            end_cluster(self._file, f"the limit of {current.dollars:g} dollars in settings.toml is reached")
        if 0 < current.idle_hours <= idle:
            reason = f"no job and no request for {current.idle_hours:g} hours, the limit idle_hours in settings.toml"
            end_cluster(self._file, reason)

    def _close_node_types(self, running: Counter[str], now: float) -> None:
        """Let the autoscaler request no node type that AWS refuses or whose setup fails."""
        news = self._markets.note_refusals([*autoscaler_log.recent_refusals(), *_failed_launches(self._file)], now)
        failed_setups = self._markets.note_failed_setups(autoscaler_log.failed_setups_by_type())
        for message in failed_setups:
            notices.send(message)
        write_limits(self._markets.limits(running, now))
        timed = [f"{time.strftime('%H:%M:%S')} {message}" for message in (*news, *failed_setups)]
        self._messages = [*self._messages, *timed][-20:]


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


def current_limits() -> tuple[LimitsSection, str]:
    """Return the limits, and a sentence if settings.toml is invalid and the last limits therefore still apply.

    This must not end the watchdog, because then the machine, and with it the cluster, would soon shut down.
    """
    try:
        return limits.load(), ""
    except settings.UserError as error:
        state = read_json(STATE_FILE)
        if not state:
            raise
        return LimitsSection(**state["limits"]), f"the last limits still apply, because {error}"


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
    """Convert a time to seconds since the epoch. Times in Ray's logs name no zone, and are in this machine's."""
    return datetime.datetime.fromisoformat(log_time).timestamp()
