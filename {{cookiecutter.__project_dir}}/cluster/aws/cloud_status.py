"""The part of `inv status` about AWS: instances and their cost, pending requests, and problems."""

from collections import Counter
from typing import Any

from rich.table import Table

from cluster.aws import reservation
from cluster.common import instances, prices
from cluster.common.cluster_file import CAPACITY_BLOCK, TARGET, ClusterFile
from cluster.common.instances import Instance
from cluster.target import CloudStatus


def cloud_status(file: ClusterFile, head_status: dict[str, Any]) -> CloudStatus:
    """Combine the instances on EC2 with what head_status.py printed on the head."""
    living = instances.living(file)
    known = prices.of_running(file, living)
    hourly = {instance.id: known.of(instance) for instance in living}
    spent = head_status["watchdog"].get("dollars", 0.0)
    notes = [f"{sum(hourly.values()):.2f} dollars per hour now, {spent:.2f} spent so far, without disks and traffic"]
    return CloudStatus(
        tables=[_table(living, hourly, head_status)],
        notes=notes + _reserved(file) + _pending(head_status) + head_status["watchdog"].get("messages", []),
        problems=_problems(head_status),
    )


def _table(living: list[Instance], hourly: dict[str, float], head_status: dict[str, Any]) -> Table:
    table = Table(title="Instances", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("id", "node type", "instance type", "zone", "age", "state", "$/hour"):
        table.add_column(column, header_style="dim", overflow="fold", no_wrap=column == "id")  # users copy ids
    joined = {node["instance"] for node in head_status["nodes"]} | {node["address"] for node in head_status["nodes"]}
    for instance in living:
        state = instance.state
        if state == "running":
            status = instance.tags.get("ray-node-status", "")
            state = "joined" if {instance.id, instance.private_address} & joined else f"not joined yet ({status})"
        table.add_row(
            *(instance.id, instance.node_type, f"{instance.instance_type} {instance.market}", instance.zone),
            *(_duration(instance.age_s), state),
            "prepaid" if instance.market == CAPACITY_BLOCK else f"{hourly[instance.id]:.2f}",
        )
    return table


def _reserved(file: ClusterFile) -> list[str]:
    reserved = reservation.find(file)
    if reserved is None:
        return []
    drain = f". Training saves a checkpoint at {reservation.local(reserved.drain)}" if reserved.is_block else ""
    return [f"{reserved.summary}{drain}"]


def _pending(head_status: dict[str, Any]) -> list[str]:
    pending = Counter[tuple[str, str]]()
    for entry in head_status["pending"]:
        pending[entry["type"], entry["details"] or "requested"] += entry["count"]
    notes = [f"{count} × {node_type} pending: {details}" for (node_type, details), count in pending.items()]
    for demand in head_status["demands"]:
        resources = ", ".join(f"{amount:g} {name}" for name, amount in demand["resources"].items())
        notes.append(f"{demand['count']} × {{{resources}}} requested but not yet placed")
    return notes


def _problems(head_status: dict[str, Any]) -> list[str]:
    problems = []
    repair = f"Run: inv up --target {TARGET}"
    if not head_status["autoscaler"]:
        problems.append(f"the autoscaler is not running on the head, so no worker starts or stops. {repair}")
    elif not head_status["watchdog"]["runs"]:
        consequence = "so the head shuts down when its lease expires"
        problems.append(f"the watchdog is not running on the head, {consequence}. {repair}")
    elif warning := head_status["watchdog"].get("idle_warning"):
        problems.append(warning)
    for refused in head_status["refused"]:
        problems.append(f"AWS refused {refused['type']} at {refused['at']} ({refused['code']}): {refused['message']}")
    return problems + [f"the setup of a new worker failed: {failure}" for failure in head_status["failed_setups"]]


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
