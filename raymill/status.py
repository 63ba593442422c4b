"""Show the state of a running cluster, and its problems. `inv status` runs this."""

import textwrap
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import requests
from rich.console import Console
from rich.table import Table

from raymill import job_client
from raymill.console import cell
from raymill.errors import UserError
from raymill.target import CloudStatus, Connection, PastJob

SHOWN_RESOURCES = ("CPU", "GPU", "memory", "objectStoreMemory")
BYTES = ("memory", "objectStoreMemory")
COMMAND_LENGTH = 60
"""The table of past jobs shows at most this many characters of a command."""
MAX_JOBS = 10
EXPECTED_ENDS = ("expected termination", "terminated due to idle")
"""Texts in Ray's messages about nodes that were ended on purpose, for example because they were idle."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What Ray's dashboard reports, in its own format."""

    nodes: list[dict[str, Any]]
    load: dict[str, Any]
    jobs: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    """Tasks, actors and placement groups for which no node has free resources."""
    serve: dict[str, Any]


def snapshot(connection: Connection) -> Snapshot:
    """Read the cluster's state from its dashboard. Raises `Unreachable` if there is no valid response."""

    def get(path: str) -> Any:
        response = requests.get(connection.dashboard + path, headers=connection.headers, timeout=job_client.TIMEOUTS_S)
        response.raise_for_status()
        return response.json()

    def find(kind: str, state: str) -> list[dict[str, Any]]:
        filters = f"filter_keys=state&filter_predicates=%3D&filter_values={state}"
        return get(f"/api/v0/{kind}?detail=1&{filters}")["data"]["result"]["result"]

    try:
        return Snapshot(
            nodes=get("/api/v0/nodes")["data"]["result"]["result"],
            load=(get("/api/cluster_status")["data"]["clusterStatus"] or {}).get("loadMetricsReport") or {},
            jobs=[job for job in get("/api/jobs/") if job_client.is_submitted(job["submission_id"])],
            waiting=find("placement_groups", "PENDING") + find("tasks", "PENDING_NODE_ASSIGNMENT"),
            serve=get("/api/serve/applications/"),
        )
    except (requests.RequestException, LookupError, TypeError, AttributeError) as error:
        raise job_client.unreachable(error, connection.target_option) from None


def show(snapshot: Snapshot, cloud: CloudStatus, console: Console) -> None:
    """Print the tables, the notes and the problems."""
    tables = (_nodes(snapshot), _resources(snapshot), _jobs(snapshot), _waiting(snapshot), _applications(snapshot))
    for table in (*cloud.tables, *tables):
        if table.row_count:
            console.print(table)
    for note in cloud.notes:
        console.print(cell(note), highlight=False)
    found = problems(snapshot) + cloud.problems
    for problem in found:
        console.print(f"[bold red]✗[/] {cell(problem)}", highlight=False)
    if not found:
        console.print("[green]✓[/] no problems")


def show_past(jobs: list[PastJob], console: Console) -> None:
    """Print the table of past jobs."""
    table = empty_table(
        *("Past jobs", "id", "owner", "state", "started", "duration", "GPUs busy", "command"), unwrapped=("id", "state")
    )
    for job in jobs:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started))
        busy = "" if job.gpu_busy_percent is None else f"{job.gpu_busy_percent:.0f} %"
        table.add_row(
            *(cell(job.id), cell(job.owner), job.state, started, f"{job.ended - job.started:.0f} s", busy),
            cell(textwrap.shorten(job.command, COMMAND_LENGTH, placeholder=" …")),
        )
    console.print(table if jobs else "no cluster has saved any job in the bucket yet")


def address(snapshot: Snapshot, connection: Connection) -> str:
    """Return the served model's URL, as seen from this machine. Raises `UserError` if no model is served."""
    applications = snapshot.serve["applications"].values()
    # "/" comes first, because it serves all models
    for application in sorted(applications, key=lambda one: one["route_prefix"] or ""):
        if application["status"] == "RUNNING":
            url = _address(snapshot.serve, application)
            for port, local_port in connection.forwarded_ports.items():
                url = url.replace(f":{port}", f":{local_port}")
            return url
    raise UserError(f"no model is served. Run: inv submit{connection.target_option} serve_llm")


def problems(snapshot: Snapshot) -> list[str]:
    """Return the problems, one sentence each."""
    found = [f"node {node['node_ip']} is dead: {node['state_message']}" for node in snapshot.nodes if _died(node)]
    found += _unmet_demands(snapshot.load)
    for job in _latest_jobs(snapshot):
        if job["status"] == "FAILED":
            code = (
                "before it started" if job["driver_exit_code"] is None else f"with exit code {job['driver_exit_code']}"
            )
            found.append(f"job {job['submission_id']} failed {code}: {_last_line(job['message'])}")
    for name, application in snapshot.serve["applications"].items():
        if application["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
            found.append(f"application {name} is {application['status'].lower()}: {_serve_reason(application)}")
    return found


def _nodes(snapshot: Snapshot) -> Table:
    table = empty_table("Nodes", "address", "role", "state", "resources")
    for node in snapshot.nodes:
        if node["state"] == "DEAD" and not _died(node):
            continue
        amounts = [f"{amount:g} {name}" for name, amount in node["resources_total"].items() if name in ("CPU", "GPU")]
        role = "head" if node["is_head_node"] else "worker"
        table.add_row(cell(node["node_ip"]), role, node["state"].lower(), ", ".join(amounts))
    return table


def _resources(snapshot: Snapshot) -> Table:
    table = empty_table("Resources", "resource", "used", "total", "pending")
    pending = _pending(snapshot.load)
    for name in SHOWN_RESOURCES:
        if name in snapshot.load.get("usage", {}):
            used, total = snapshot.load["usage"][name]
            requested = sum(bundle.get(name, 0) * count for bundle, count in pending)
            table.add_row(
                name, _amount(name, used), _amount(name, total), _amount(name, requested) if requested else ""
            )
    return table


def _jobs(snapshot: Snapshot) -> Table:
    table = empty_table("Jobs", "id", "owner", "state", "started", "duration")
    for job in _latest_jobs(snapshot):
        started = (job["start_time"] or 0) / 1000
        ended = (job["end_time"] or time.time() * 1000) / 1000
        clock = time.strftime("%H:%M:%S", time.localtime(started))
        owner = cell(job_client.owner(job["metadata"]))
        table.add_row(cell(job["submission_id"]), owner, job["status"].lower(), clock, f"{ended - started:.0f} s")
    return table


def _waiting(snapshot: Snapshot) -> Table:
    """Return a table of the resources that jobs wait for."""
    table = empty_table("Waiting", "job", "owner", "for")
    jobs = {job["job_id"]: job for job in snapshot.jobs}
    wanted = Counter[tuple[str, str]]()
    for one in snapshot.waiting:
        if "bundles" in one:
            wanted.update((one["creator_job_id"], _resource_names(part["unit_resources"])) for part in one["bundles"])
        elif not one["placement_group_id"]:  # otherwise it waits for a placement group, which is also in the list
            wanted[one["job_id"], _resource_names(one["required_resources"])] += 1
    for (job_id, resources), count in wanted.items():
        if job := jobs.get(job_id):
            owner = cell(job_client.owner(job["metadata"]))
            table.add_row(cell(job["submission_id"]), owner, f"{count} × {cell(resources)}")
    return table


def _resource_names(amounts: dict[str, float]) -> str:
    return ", ".join(f"{_amount(name, amount)} {name}" for name, amount in amounts.items())


def _applications(snapshot: Snapshot) -> Table:
    table = empty_table("Serve applications", "name", "state", "address", "deployments")
    for name, application in snapshot.serve["applications"].items():
        deployments = [
            f"{deployment.rpartition(':')[2]} ×{len(details['replicas'])}"
            for deployment, details in application["deployments"].items()
        ]
        table.add_row(
            *(cell(name), application["status"].lower()),
            *(cell(_address(snapshot.serve, application)), cell(", ".join(deployments))),
        )
    return table


def empty_table(title: str, *columns: str, unwrapped: Collection[str] = ("id",)) -> Table:
    """Return a table without rows. The columns `unwrapped` keep their lines whole; users copy ids."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold", no_wrap=column in unwrapped)
    return table


def _died(node: dict[str, Any]) -> bool:
    message = (node["state_message"] or "").lower()
    return node["state"] == "DEAD" and not any(text in message for text in EXPECTED_ENDS)


def _latest_jobs(snapshot: Snapshot) -> list[dict[str, Any]]:
    return sorted(snapshot.jobs, key=lambda job: job["start_time"] or 0)[-MAX_JOBS:]


def _pending(load: dict[str, Any]) -> list[tuple[dict[str, float], int]]:
    """Return each pending bundle of resources, and how often it is requested."""
    bundles = [(bundle, count) for bundle, count in load.get("resourceDemand", [])]
    for group, count in load.get("pgDemand", []):
        bundles += [(bundle, int(number) * count) for bundle, number in group.get("bundles", [])]
    return bundles


def _unmet_demands(load: dict[str, Any]) -> list[str]:
    found = []
    for bundle, count in _pending(load):
        for name, amount in bundle.items():
            total = load.get("usage", {}).get(name, [0, 0])[1]
            if amount > total:
                found.append(f"{count} × {amount:g} {name} requested, but the cluster has only {total:g} {name}")
    return found


def _address(serve: dict[str, Any], application: dict[str, Any]) -> str:
    options = serve.get("http_options") or {}
    return f"http://{options.get('host')}:{options.get('port')}{(application['route_prefix'] or '').rstrip('/')}"


def _serve_reason(application: dict[str, Any]) -> str:
    messages = [application["message"], *(details["message"] for details in application["deployments"].values())]
    return _last_line("\n".join(filter(None, messages)))


def _last_line(text: str | None) -> str:
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"


def _amount(name: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if name in BYTES else f"{value:g}"
