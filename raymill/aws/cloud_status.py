"""The part of `inv status` about AWS: instances and their cost, pending requests, and problems."""

from collections import Counter
from typing import Any

from rich.table import Table

from raymill import status
from raymill.aws import node_reports, reservation
from raymill.aws.node_reports import NodeReport
from raymill.common import instances, prices
from raymill.common.cluster_file import CAPACITY_BLOCK, ClusterFile, target
from raymill.common.instances import Instance
from raymill.node import gpu_use, log_shipping
from raymill.node.gpu_use import GpuUse
from raymill.target import CloudStatus

HEADS_KEY = "ray_bootstrap_key.pem"
"""File in which Ray's launcher leaves the head the key for the workers."""
NEW_S = 600
"""An instance that is younger may have joined only now, so it need not have copied its logs yet."""


def cloud_status(file: ClusterFile, head_status: dict[str, Any]) -> CloudStatus:
    """Combine the instances on EC2 with what head_status.py printed on the head."""
    living = instances.living(file)
    known, _ = prices.of_running(file, living)
    hourly = {instance.id: known.of(instance) for instance in living}
    joined = [instance for instance in living if _has_joined(instance, head_status)]
    reports = node_reports.read(file, head_status["session"])
    spent = head_status["watchdog"].get("dollars", 0.0)
    now = sum(price or 0 for price in hourly.values())
    more = " and the instances whose price is unknown" if None in hourly.values() else ""
    notes = [f"{now:.2f} dollars per hour now{more}, {spent:.2f} spent so far, without disks and traffic"]
    return CloudStatus(
        tables=[_table(living, hourly, head_status), _gpus(joined, reports, head_status["at"])],
        notes=notes
        + _reserved(file)
        + _pending(head_status)
        + _idle_gpus(joined, reports)
        + head_status["watchdog"].get("messages", []),
        problems=_problems(head_status)
        + _full_disks(joined, reports, head_status, file)
        + _silent_nodes(joined, reports, head_status["at"], file)
        + [describe_failed_launch(one) for one in instances.failed_launches(file)],
    )


def describe_failed_launch(instance: Instance) -> str:
    """Return a sentence that says why EC2 ended an instance during its launch, and what to check."""
    advice = {
        "Client.InternalError": "If your account encrypts disks with a key of its own, check that the key is enabled, "
        f"and that its policy lets IAM policies grant its use: inv doctor --target {target()}",
        "Client.VolumeLimitExceeded": "Delete volumes that you no longer need, or request a higher quota for EBS "
        "storage in the AWS console, under Service Quotas",
    }.get(instance.end_code, "AWS may have room later, or in another zone")
    return f"AWS ended {instance.id} ({instance.node_type}) during its launch: {instance.end_reason}. {advice}"


def _table(living: list[Instance], hourly: dict[str, float | None], head_status: dict[str, Any]) -> Table:
    table = status.empty_table("Instances", "id", "node type", "instance type", "zone", "age", "state", "$/hour")
    for instance in living:
        state = instance.state
        if state == "running":
            step = instance.tags.get("ray-node-status", "")
            state = "joined" if _has_joined(instance, head_status) else f"not joined yet ({step})"
        table.add_row(
            *(instance.id, instance.node_type, f"{instance.instance_type} {instance.market}", instance.zone),
            *(_duration(instance.age_s), state),
            "prepaid" if instance.market == CAPACITY_BLOCK else _dollars(hourly[instance.id]),
        )
    return table


def _dollars(price: float | None) -> str:
    return "unknown" if price is None else f"{price:.2f}"


def _has_joined(instance: Instance, head_status: dict[str, Any]) -> bool:
    return any(
        instance.id == node["instance"] or instance.private_address == node["address"] for node in head_status["nodes"]
    )


def _gpus(joined: list[Instance], reports: dict[str, NodeReport], now: float) -> Table:
    """Return a table with the use of the GPUs of each instance. `now` is the head's time."""
    table = status.empty_table("GPUs", "id", "GPUs", "busy", "memory used", "measured")
    for instance in joined:
        if gpus := _reported(instance, reports):
            total = f"of {max(gpu.memory_total_mib for gpu in gpus) / 1024:.0f} GiB"
            table.add_row(
                *(instance.id, str(len(gpus)), f"{_range([gpu.busy_percent for gpu in gpus])} %"),
                f"{_range([round(gpu.memory_used_mib / 1024) for gpu in gpus])} {total}",
                f"{_duration(max(0, now - gpus[0].seconds))} ago",
            )
    return table


def _idle_gpus(joined: list[Instance], reports: dict[str, NodeReport]) -> list[str]:
    notes = []
    for instance in joined:
        idle = [gpu for gpu in _reported(instance, reports) if gpu.idle_samples >= gpu_use.IDLE_SAMPLES]
        if idle:
            minutes = min(gpu.idle_samples for gpu in idle) * gpu_use.INTERVAL_S / 60
            named = ", ".join(str(gpu.gpu) for gpu in idle)
            notes.append(
                f"{instance.id}: for {minutes:.0f} minutes, GPU {named} has not been busy for more than "
                f"{gpu_use.BUSY_PERCENT} % of the time"
            )
    return notes


def _silent_nodes(joined: list[Instance], reports: dict[str, NodeReport], now: float, file: ClusterFile) -> list[str]:
    """Return a problem for each node whose logs do not reach the bucket."""
    problems = []
    for instance in joined:
        report = reports.get(instance.id)
        if report is None and instance.age_s < NEW_S:
            continue
        if report is None or now - report.saved > log_shipping.SILENT_S:
            since = f"for {_duration(now - report.saved)}" if report else "yet"
            problems.append(
                f"{instance.id} has not copied its logs to the bucket {since}, so they will be lost. To see why: "
                f'inv ssh --target {target()} --command "{_show_log(instance, file)}"'
            )
    return problems


def _full_disks(
    joined: list[Instance], reports: dict[str, NodeReport], head_status: dict[str, Any], file: ClusterFile
) -> list[str]:
    """Return a problem for each node with a disk that is nearly full. The head says it itself."""
    workers = [one.id for one in joined if one.node_type != file.head.name]
    found = [head_status.get("disk", "")] + [reports[one].disk for one in workers if one in reports]
    return [problem for problem in found if problem]


def _show_log(instance: Instance, file: ClusterFile) -> str:
    """Return the command that prints the log of log_shipping.py, for the head's shell."""
    command = f"tail {log_shipping.LOG_FILE.name}"
    if instance.node_type == file.head.name:
        return command
    return f"ssh -o StrictHostKeyChecking=accept-new -i {HEADS_KEY} {instance.private_address} {command}"


def _reported(instance: Instance, reports: dict[str, NodeReport]) -> list[GpuUse]:
    return reports[instance.id].gpus if instance.id in reports else []


def _range(numbers: list[int]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


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
    repair = f"Run: inv up --target {target()}"
    if not head_status["autoscaler"]:
        problems.append(f"the autoscaler is not running on the head, so no worker starts or stops. {repair}")
    elif not head_status["watchdog"]["runs"]:
        consequence = "so the head shuts down when its lease expires"
        problems.append(f"the watchdog is not running on the head, {consequence}. {repair}")
    elif warning := head_status["watchdog"].get("idle_warning"):
        problems.append(warning)
    if warning := head_status["watchdog"].get("price_warning"):
        problems.append(warning)
    for refused in head_status["refused"]:
        problems.append(f"AWS refused {refused['type']} at {refused['at']} ({refused['code']}): {refused['message']}")
    return problems + [f"the setup of a new worker failed: {failure}" for failure in head_status["failed_setups"]]


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
