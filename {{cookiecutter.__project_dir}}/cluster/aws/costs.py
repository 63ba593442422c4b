"""The part of `inv status` that only a rented cluster has: machines, what is pending and why, and dollars."""

from collections import Counter
from typing import Any

from rich.table import Table

from cluster.common import instances, prices
from cluster.common.cluster_file import TARGET, ClusterFile
from cluster.common.instances import Instance
from cluster.target import Bill


def report(file: ClusterFile, head_report: dict[str, Any]) -> Bill:
    """From what EC2 says of the machines, and the head of its autoscaler (see head_report.py)."""
    living = instances.living(file)
    known = prices.ask(file)
    hourly = {machine.id: _price(machine, known, file) for machine in living}
    spent = head_report["watchdog"].get("dollars", 0.0)
    notes = [f"{sum(hourly.values()):.2f} dollars an hour now, {spent:.2f} spent since up, without disks and traffic"]
    return Bill(
        tables=[_table(living, hourly, head_report)],
        notes=notes + _pending(head_report) + head_report["watchdog"].get("messages", []),
        problems=_problems(head_report),
    )


def _price(machine: Instance, known: prices.Prices, file: ClusterFile) -> float:
    return known.of(machine.node_type, file) if machine.node_type in (file.head.name, *known.workers) else 0.0


def _table(living: list[Instance], hourly: dict[str, float], head_report: dict[str, Any]) -> Table:
    table = Table(title="Machines", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("id", "node type", "machine", "zone", "age", "state", "$/hour"):
        table.add_column(column, header_style="dim", overflow="fold", no_wrap=column == "id")  # ids are copied
    joined = {node["instance"] for node in head_report["nodes"]} | {node["address"] for node in head_report["nodes"]}
    for machine in living:
        state = machine.state
        if state == "running":
            status = machine.tags.get("ray-node-status", "")
            state = "joined" if {machine.id, machine.private_address} & joined else f"not joined yet ({status})"
        table.add_row(
            *(machine.id, machine.node_type, f"{machine.instance_type} {machine.market}", machine.zone),
            *(_duration(machine.age_s), state, f"{hourly[machine.id]:.2f}"),
        )
    return table


def _pending(head_report: dict[str, Any]) -> list[str]:
    coming = Counter[tuple[str, str]]()
    for entry in head_report["pending"]:
        coming[entry["type"], entry["details"] or "asked for"] += entry["count"]
    notes = [f"{count} × {node_type} on the way: {details}" for (node_type, details), count in coming.items()]
    for demand in head_report["demands"]:
        resources = ", ".join(f"{amount:g} {name}" for name, amount in demand["resources"].items())
        notes.append(f"{demand['count']} × {{{resources}}} is asked for and has no place yet")
    return notes


def _problems(head_report: dict[str, Any]) -> list[str]:
    problems = []
    if not head_report["autoscaler"]:
        problems.append(
            "the autoscaler does not run on the head, so no worker starts or ends; repair it with: "
            f"inv up --target {TARGET}"
        )
    elif not head_report["watchdog"]["runs"]:
        problems.append(
            "the watchdog does not run on the head, which ends when its lease expires; repair it with: "
            f"inv up --target {TARGET}"
        )
    for refused in head_report["refused"]:
        problems.append(f"AWS refused {refused['type']} at {refused['at']} ({refused['code']}): {refused['words']}")
    return problems + [f"a new worker was given up: {words}" for words in head_report["failed_setups"]]


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
