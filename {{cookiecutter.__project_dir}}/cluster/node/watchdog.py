"""The steward: looks after a cluster's machines and money from inside. cluster.yaml starts it on every node.

On a worker it answers a spot notice with a Ray drain, so that training can checkpoint, and ends the machine when the
head has been gone for ten minutes. On the head, beside Ray's autoscaler, which retries a refused type for ever, it
closes a type for some minutes after a refusal so that the next is tried, closes one for good after three failed
set-ups, and ends the whole cluster at its limit of hours or dollars.

Both hold the machine's lease: cluster.yaml's UserData shuts a machine down whose lease nobody has renewed for ten
minutes, and a shutdown terminates it. So a dead steward ends its machine too.
"""

import contextlib
import datetime
import json
import os
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import settings

if TYPE_CHECKING:
    from cluster.common.cluster_file import ClusterFile

LEASE = Path("/run/lease/renewed")
RAY_CONFIG = Path("~/ray_bootstrap_config.yaml").expanduser()
"""What the autoscaler reads anew in each of its loops; Ray writes it as JSON."""
SAID = Path("~/steward.json").expanduser()
"""What the steward has done, for `inv status`."""
LOG = Path("~/steward.log").expanduser()
PID = Path("~/steward.pid").expanduser()
METADATA = "http://169.254.169.254/latest/"
GCS_PORT = 6379
EVERY_S = 5.0
SILENT_S = 60.0
"""A steward that has noted nothing for so long does not run: it waits for AWS for seconds, not more."""
CLOSED_S = 300.0
"""For so long a type stays closed after AWS refused it."""
MOST_FAILED_SETUPS = 3


class LimitsSection(settings.Section):
    """[cluster.limits] of settings.toml."""

    hours: float
    """The cluster ends itself so long after its head was launched."""
    dollars: float
    """The cluster ends itself when its machines have cost so much, without disks and traffic."""


# ---------------------------------------------------------------- every machine


def watch_worker(head: str) -> None:
    """Renew the lease while the head answers, and drain this node when AWS takes it back. Never returns."""
    drained = False
    while True:
        if answers(head):
            LEASE.touch()
        if not drained and (notice := spot_notice()):
            drained = drain(head, notice)
        time.sleep(EVERY_S)


def answers(head: str) -> bool:
    """Whether the head's control store takes connections."""
    try:
        socket.create_connection((head, GCS_PORT), timeout=3).close()
    except OSError:
        return False
    return True


def spot_notice() -> str | None:
    """When AWS takes this machine back, as it says it; None while it does not."""
    try:
        asked = urllib.request.Request(
            f"{METADATA}api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        )
        with urllib.request.urlopen(asked, timeout=2) as answer:
            token = answer.read().decode()
        request = urllib.request.Request(
            f"{METADATA}meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token}
        )
        with urllib.request.urlopen(request, timeout=2) as answer:
            return json.loads(answer.read())["time"]
    except OSError:
        return None  # 404: no notice


def drain(head: str, notice: str) -> bool:
    """Tell Ray that this node goes, so that it places nothing new here; returns whether Ray accepted."""
    seconds = datetime.datetime.fromisoformat(notice).timestamp() - time.time()
    command = ["ray", "drain-node", "--address", f"{head}:{GCS_PORT}", "--node-id", own_node_id(head)]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", str(max(0, int(seconds)))]
    command += ["--reason-message", f"AWS takes this machine back at {notice}"]
    return subprocess.run(command, check=False).returncode == 0


def own_node_id(head: str) -> str:
    from ray._raylet import GcsClient  # here: a worker's steward is small until it has to be more

    with socket.create_connection((head, GCS_PORT)) as connection:
        address = connection.getsockname()[0]
    nodes = GcsClient(address=f"{head}:{GCS_PORT}").get_all_node_info().values()
    return next(node.node_id.hex() for node in nodes if node.node_manager_address == address and node.state == 0)


# ---------------------------------------------------------------- the head


@dataclass
class Market:
    """Which node types the autoscaler may ask for."""

    most: dict[str, int]
    """max_workers of each type, as cluster.yaml says."""
    closed_until: dict[str, float] = field(default_factory=dict)
    """Seconds since the epoch; infinity for a type whose set-ups fail."""

    def note_refusals(self, refusals: Iterable[Mapping[str, str]], now: float) -> list[str]:
        """Close the type of each refusal (see head_report.py) for a while from then; returns what to say."""
        said = []
        for refusal in refusals:
            node_type = refusal["type"]
            closed, until = self.closed_until.get(node_type, 0), _seconds(refusal["at"]) + CLOSED_S
            if closed <= now < until:  # Ray asks several times before it sees the new limit: said once
                said.append(f"AWS refused {node_type} ({refusal['code']}): closed for {CLOSED_S / 60:.0f} minutes")
            self.closed_until[node_type] = max(closed, until)
        return said

    def note_failed_setups(self, failures: Counter[str]) -> list[str]:
        """Close a type for good after its third failed set-up; returns what to say."""
        said = []
        for node_type, count in failures.items():
            if count >= MOST_FAILED_SETUPS and self.closed_until.get(node_type) != float("inf"):
                self.closed_until[node_type] = float("inf")
                said.append(
                    f"{count} machines of {node_type} failed in their set-up: no more are started until you correct "
                    "setup_commands in cluster/cluster.yaml and run `inv up` again"
                )
        return said

    def limits(self, running: Counter[str], now: float) -> dict[str, int]:
        """max_workers of each type for now. A closed type keeps what runs: Ray would end what is above its limit."""
        return {
            node_type: running[node_type] if self.closed_until.get(node_type, 0) > now else most
            for node_type, most in self.most.items()
        }


@dataclass
class Meter:
    """What the machines have cost so far."""

    hourly: dict[str, float]
    """Dollars an hour by node type."""
    dollars: float

    def add(self, running: Counter[str], seconds: float) -> None:
        """Count `seconds` of each of the machines that run."""
        hourly = sum(count * self.hourly.get(node_type, 0.0) for node_type, count in running.items())
        self.dollars += hourly * seconds / 3600


def watch_head() -> None:
    """Look after the lease, markets and limits. Never returns."""
    from cluster.common import cluster_file, instances, prices
    from cluster.node import head_report  # here: a worker's steward is small

    limits = settings.load(LimitsSection, "limits", profile="cluster")
    file = cluster_file.load()
    renew_lease_within(limits, file)  # before AWS is asked: its silence is no reason to end a cluster
    known = prices.ask(file)
    memory = json.loads(SAID.read_text()) if SAID.exists() else {}
    market = Market({worker.name: worker.most for worker in file.workers})
    meter = Meter({file.head.name: known.head, **known.workers}, memory.get("dollars", 0.0))
    said, last = memory.get("said", []), memory.get("at", time.time())
    while True:
        renew_lease_within(limits, file)
        running, now = Counter(machine.node_type for machine in instances.living(file)), time.time()
        meter.add(running, now - last)
        last = now
        news = market.note_refusals(head_report.recent_refusals(), now)
        news += market.note_failed_setups(head_report.failed_setups_by_type())
        write_limits(market.limits(running, now))
        said = [*said, *(f"{time.strftime('%H:%M:%S')} {sentence}" for sentence in news)][-20:]
        SAID.write_text(json.dumps({"at": now, "dollars": meter.dollars, "said": said}))
        if meter.dollars >= limits.dollars:
            end_everything(file, f"the limit of {limits.dollars:g} dollars in settings.toml is reached")
        time.sleep(EVERY_S)


def renew_lease_within(limits: LimitsSection, file: "ClusterFile") -> None:
    """Renew the head's lease, or end the cluster when its hours are over. The lease's folder was made at boot."""
    if time.time() - LEASE.parent.stat().st_mtime >= limits.hours * 3600:
        end_everything(file, f"the limit of {limits.hours:g} hours in settings.toml is reached")
    LEASE.touch()


def write_limits(most: dict[str, int]) -> None:
    """Set max_workers of each type under the running autoscaler, where it differs."""
    config = json.loads(RAY_CONFIG.read_text())
    types = config["available_node_types"]
    changed = [name for name, limit in most.items() if types[name].get("max_workers") != limit]
    for name in changed:
        types[name]["max_workers"] = most[name]
    if changed:
        partial = RAY_CONFIG.with_suffix(".partial")
        partial.write_text(json.dumps(config))
        partial.replace(RAY_CONFIG)  # the autoscaler never reads half a file


def end_everything(file: "ClusterFile", reason: str) -> None:
    """End all workers, then this machine. Workers that AWS does not let it end do so when their leases run out."""
    from cluster.common import instances

    print(reason, flush=True)
    write_limits({worker.name: 0 for worker in file.workers})  # the autoscaler would replace them
    try:
        if workers := [one.id for one in instances.living(file) if one.node_type != file.head.name]:
            file.client("ec2").terminate_instances(InstanceIds=workers)
        instances.say_last_words(file, reason)
    finally:
        subprocess.run(["sudo", "shutdown", "-h", "now"], check=True)
        time.sleep(60)  # nothing more is to be done until that takes effect


def _seconds(log_time: str) -> float:
    """Since the epoch, of a time in Ray's logs, which are in this machine's zone."""
    return datetime.datetime.fromisoformat(log_time).timestamp()


def take_over() -> None:
    """End the steward that an earlier start of Ray left on this machine."""
    if PID.exists():
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            earlier = psutil.Process(int(PID.read_text()))
            if "cluster.node.watchdog" in earlier.cmdline():  # the number may be another's by now
                earlier.terminate()
    PID.write_text(str(os.getpid()))


if __name__ == "__main__":
    take_over()
    while True:
        try:
            watch_head() if sys.argv[1] == "head" else watch_worker(os.environ["RAY_HEAD_IP"])
        except Exception:  # such as AWS not answering: a machine without a steward would end
            traceback.print_exc()
            time.sleep(EVERY_S)
