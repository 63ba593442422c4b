"""The watchdog on the head, which closes node types, enforces the limits and renews the lease.

If AWS refuses a node type, Ray's autoscaler retries that type forever. So the watchdog closes the type for a few
minutes: it lowers max_workers to the number of the type's running instances, and the autoscaler tries the next type.
"""

import contextlib
import datetime
import json
import logging
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from raymill import state_files
from raymill.common import aws_session, bucket, cluster_file, instances, limits, remaining_costs
from raymill.common.cluster_file import ClusterFile
from raymill.common.instances import Instance
from raymill.common.limits import LimitsSection
from raymill.node import autoscaler_log, disk_use, notices, state
from raymill.node.activity import Activity
from raymill.node.spending import Spending
from raymill.node.state import INTERVAL_S, LAUNCHED, LEASE, RAY_CONFIG

log = logging.getLogger(__name__)
CLOSED_S = 300.0
"""How long a node type stays closed after AWS refuses it."""
REQUEST_TIMEOUT_S = 120.0
"""How long the autoscaler waits for a launched instance to appear (see cluster.yaml). If its type were closed before,
the autoscaler would fail in each of its loops, because it cannot withdraw such a request."""
MAX_FAILED_SETUPS = 3
UNPRICED_S = 300.0
"""A price that is unknown for this long is worth a notice."""
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
                    f"setup_commands in cluster/cluster.yaml and run again: inv up --target {cluster_file.target()}"
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


def watch() -> None:
    """Watch over the cluster. Never returns."""
    file = cluster_file.load()
    _give_up_early(file)
    # before asking AWS: if AWS does not answer, the lease must not expire
    renew_lease_within(current_limits()[0], file)
    watchdog = HeadWatchdog(file)
    while True:
        watchdog.check()
        time.sleep(INTERVAL_S)


def _give_up_early(file: ClusterFile) -> None:
    """Let no call to AWS delay the limits. By default, a call that is not answered takes five minutes."""
    limited = Config(connect_timeout=5, read_timeout=10, retries={"mode": "standard", "total_max_attempts": 2})
    aws_session.start(file.region, limited)


class HeadWatchdog:
    """Renews the lease, closes refused and failing node types, and enforces the limits."""

    def __init__(self, file: ClusterFile) -> None:
        """Continue with the state that an earlier watchdog has saved."""
        saved = state.read_watchdog()
        self._file = file
        self._living: list[Instance] | None = None
        self._markets = Markets({worker.name: worker.max_workers for worker in file.workers})
        self._spending = Spending(file, saved)
        self._activity = Activity(max(STARTED, saved.get("last_use", 0.0)), saved.get("requests", 0.0))
        self._messages = saved.get("messages", [])
        if not saved and state.STATE_FILE.exists():
            lost = f"{state.STATE_FILE} was damaged, so the limit in dollars counts only the instances that still run"
            self._messages.append(f"{time.strftime('%H:%M:%S')} {lost}")
            notices.send(lost)
        # the clock may jump while this process runs; without a saved state, each instance counts from its launch
        self._counted = time.monotonic() - max(0.0, time.time() - saved.get("at", 0.0))
        """When costs were last counted, by the monotonic clock."""
        self._warned_after = saved.get("warned_after", 0.0)
        self._unpriced_since: float | None = None

    def check(self) -> None:
        """Check everything once, and save the state.

        The limits come first, because everything else may fail, for example if the disk is full.
        """
        current, problem = current_limits()  # each time, because `inv limits` changes them
        if problem and not any(problem in message for message in self._messages):
            self._messages.append(f"{time.strftime('%H:%M:%S')} {problem}")
        renew_lease_within(current, self._file)
        living, now = self._running(), time.time()
        started = time.monotonic()
        per_hour = self._spending.add(living, started - self._counted)
        self._counted = started
        if self._spending.dollars >= current.dollars:
            reached = f"the limit of {current.dollars:g} dollars in settings.toml is reached"
            end_cluster(self._file, reached + self._spending.caveat)
        self._activity.check(now)
        idle = (now - self._activity.last) / 3600
        if 0 < current.idle_hours <= idle:
            reason = f"no job and no request for {current.idle_hours:g} hours, the limit idle_hours in settings.toml"
            end_cluster(self._file, reason)
        _try("node types were not closed", lambda: self._close_node_types(living, now))
        warning = current.idle_warning(idle)
        if warning and self._warned_after != self._activity.last:
            self._warned_after = self._activity.last
            notices.send(warning)
        self._tell_unknown_prices(now)
        used = {"hours": hours_used(), "idle_hours": idle, "dollars_per_hour": per_hour, **self._spending.state()}
        _save(
            {
                **{"at": now, "limits": current.model_dump(), **used, "price_warning": self._spending.warning},
                **{"last_use": self._activity.last, "requests": self._activity.requests},
                **{"idle_warning": warning, "warned_after": self._warned_after, "messages": self._messages},
            }
        )

    def _running(self) -> list[Instance]:
        """Return the living instances. If AWS does not answer, return those of the last answer: they still cost."""
        try:
            self._living = instances.living(self._file)
        except (BotoCoreError, ClientError) as error:
            if self._living is None:
                raise
            log.warning("the instances are unknown, so the last ones count: %s", error)
        return self._living

    def _tell_unknown_prices(self, now: float) -> None:
        """Send a notice if a price stays unknown, because the limit may then end the cluster too early."""
        if not self._spending.warning:
            self._unpriced_since = None
        elif self._unpriced_since is None:
            self._unpriced_since = now
        elif now - self._unpriced_since >= UNPRICED_S:
            self._unpriced_since = float("inf")  # only once
            notices.send(self._spending.warning)

    def _close_node_types(self, living: list[Instance], now: float) -> None:
        """Let the autoscaler request no node type that AWS refuses or whose setup fails."""
        running = Counter(one.node_type for one in living if one.state != "shutting-down")
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
    except Exception as error:  # also if the file cannot be read
        saved = state.read_watchdog()
        if not saved:
            raise
        return LimitsSection(**saved["limits"]), f"the last limits still apply, because {error}"


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
        state_files.replace(RAY_CONFIG, json.dumps(config))


def end_cluster(file: ClusterFile, reason: str) -> None:
    """Terminate all workers, then this machine. A worker that survives shuts down when its lease expires.

    Never returns, so that this machine's lease expires if it does not shut down. No step prevents the next ones.
    """
    log.warning("%s", reason)
    if full := disk_use.nearly_full():
        reason = f"{reason}; {full}"
    _try("the autoscaler was not stopped", stop_autoscaler)
    _try("the workers were not terminated", lambda: _terminate_workers(file))
    _try("the note was not saved", lambda: bucket.leave_note(file, reason))
    _try("no notice was sent", lambda: _send_end(reason))
    while True:
        subprocess.run(["sudo", "shutdown", "-h", "now"], check=False)
        time.sleep(60)  # the shutdown takes effect within this time


def stop_autoscaler() -> None:
    """Kill Ray's autoscaler, which would replace the workers. A full disk does not prevent this."""
    options = [f"--autoscaling-config={path}" for path in (RAY_CONFIG, f"~/{RAY_CONFIG.name}")]  # as in cluster.yaml
    for process in psutil.process_iter(["cmdline", "uids"]):
        is_own = process.info["uids"] and process.info["uids"].real == os.getuid()
        if is_own and set(options) & set(process.info["cmdline"] or []):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _send_end(reason: str) -> None:
    notices.send(f"the cluster shuts itself down: {reason}. {remaining_costs.describe()}")


def _terminate_workers(file: ClusterFile) -> None:
    if workers := [one.id for one in instances.living(file) if one.node_type != file.head.name]:
        instances.terminate(file, workers)


def _try(failure: str, step: Callable[[], None]) -> None:
    """Take a step. If it fails, log the failure."""
    try:
        step()
    except Exception:
        log.exception("%s", failure)


def _save(current: dict[str, Any]) -> None:
    """Save the state, on the disk or, if it is full, in memory."""
    try:
        state_files.replace(state.STATE_FILE, json.dumps(current))
    except OSError as error:
        log.warning("the state is only kept in memory: %s", error)
        _try("the state was not saved", lambda: state_files.replace(state.STATE_WITHOUT_DISK, json.dumps(current)))


def _seconds(log_time: str) -> float:
    """Convert a time to seconds since the epoch. Times in Ray's logs name no zone, and are in this machine's."""
    return datetime.datetime.fromisoformat(log_time).timestamp()
