"""`inv status`: what a person wants to know of a running cluster, and what is wrong with it, in words."""

import time
from dataclasses import dataclass
from typing import Any

import requests
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import settings
from cluster import job_client
from cluster.target import Bill, Connection

SHOWN_RESOURCES = ("CPU", "GPU", "memory", "objectStoreMemory")
BYTES = ("memory", "objectStoreMemory")
MOST_JOBS = 10
ON_PURPOSE = ("expected termination", "terminated due to idle")
"""What Ray says of a dead node that the autoscaler, or a gang, took away."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What Ray's dashboard answers, as it answers it."""

    nodes: list[dict[str, Any]]
    load: dict[str, Any]
    jobs: list[dict[str, Any]]
    serve: dict[str, Any]


def snapshot(connection: Connection) -> Snapshot:
    """Read the cluster's state from its dashboard. Raises `Unreachable` if that gives no valid answer."""

    def get(path: str) -> Any:
        response = requests.get(connection.dashboard + path, headers=connection.headers, timeout=job_client.TIMEOUTS_S)
        response.raise_for_status()
        return response.json()

    try:
        return Snapshot(
            nodes=get("/api/v0/nodes")["data"]["result"]["result"],
            load=(get("/api/cluster_status")["data"]["clusterStatus"] or {}).get("loadMetricsReport") or {},
            jobs=[job for job in get("/api/jobs/") if job_client.is_submitted(job["submission_id"])],
            serve=get("/api/serve/applications/"),
        )
    except (requests.RequestException, LookupError, TypeError, AttributeError) as error:
        raise job_client.unreachable(error, connection.where) from None


def show(snapshot: Snapshot, bill: Bill, console: Console) -> None:
    """Print the tables, then the list of what is wrong."""
    for table in (*bill.tables, _nodes(snapshot), _resources(snapshot), _jobs(snapshot), _applications(snapshot)):
        if table.row_count:
            console.print(table)
    for note in bill.notes:
        console.print(escape(note), highlight=False)
    wrong = problems(snapshot) + bill.problems
    for sentence in wrong:
        console.print(f"[bold red]✗[/] {escape(sentence)}", highlight=False)
    if not wrong:
        console.print("[green]✓[/] nothing is wrong")


def address(snapshot: Snapshot, connection: Connection) -> str:
    """URL, on this machine, of the application that answers. Raises `settings.UserError` when none does."""
    applications = snapshot.serve["applications"].values()
    for application in sorted(applications, key=lambda one: one["route_prefix"] or ""):  # the one that knows all first
        if application["status"] == "RUNNING":
            url = _address(snapshot.serve, application)
            for port, here in connection.forwarded.items():
                url = url.replace(f":{port}", f":{here}")
            return url
    raise settings.UserError("no model is served; serve one with: inv submit serve_llm")


def problems(snapshot: Snapshot) -> list[str]:
    """What is wrong, one sentence each."""
    found = [f"node {node['node_ip']} is dead: {node['state_message']}" for node in snapshot.nodes if _dead(node)]
    found += _unmet_demands(snapshot.load)
    for job in _latest_jobs(snapshot):
        if job["status"] == "FAILED":
            code = (
                "before it started" if job["driver_exit_code"] is None else f"with exit code {job['driver_exit_code']}"
            )
            words = _last_line(job["message"])
            found.append(f"job {job['submission_id']} failed {code}, its last words: {words}")
    for name, application in snapshot.serve["applications"].items():
        if application["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
            found.append(f"application {name} is {application['status'].lower()}: {_serve_reason(application)}")
    return found


def _nodes(snapshot: Snapshot) -> Table:
    table = _table("Nodes", "address", "role", "state", "resources")
    for node in snapshot.nodes:
        if node["state"] == "DEAD" and not _dead(node):
            continue
        amounts = [f"{amount:g} {name}" for name, amount in node["resources_total"].items() if name in ("CPU", "GPU")]
        role = "head" if node["is_head_node"] else "worker"
        table.add_row(node["node_ip"], role, node["state"].lower(), ", ".join(amounts))
    return table


def _resources(snapshot: Snapshot) -> Table:
    table = _table("Resources", "resource", "used", "total", "asked for and waiting")
    waiting = _waiting(snapshot.load)
    for name in SHOWN_RESOURCES:
        if name in snapshot.load.get("usage", {}):
            used, total = snapshot.load["usage"][name]
            asked = sum(bundle.get(name, 0) * count for bundle, count in waiting)
            table.add_row(name, _amount(name, used), _amount(name, total), _amount(name, asked) if asked else "")
    return table


def _jobs(snapshot: Snapshot) -> Table:
    table = _table("Jobs", "id", "state", "started", "took")
    for job in _latest_jobs(snapshot):
        started = (job["start_time"] or 0) / 1000
        ended = (job["end_time"] or time.time() * 1000) / 1000
        clock = time.strftime("%H:%M:%S", time.localtime(started))
        table.add_row(job["submission_id"], job["status"].lower(), clock, f"{ended - started:.0f} s")
    return table


def _applications(snapshot: Snapshot) -> Table:
    table = _table("Serve applications", "name", "state", "address", "deployments")
    for name, application in snapshot.serve["applications"].items():
        deployments = [
            f"{deployment.rpartition(':')[2]} ×{len(details['replicas'])}"
            for deployment, details in application["deployments"].items()
        ]
        table.add_row(
            name, application["status"].lower(), _address(snapshot.serve, application), ", ".join(deployments)
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table


def _dead(node: dict[str, Any]) -> bool:
    message = (node["state_message"] or "").lower()
    return node["state"] == "DEAD" and not any(words in message for words in ON_PURPOSE)


def _latest_jobs(snapshot: Snapshot) -> list[dict[str, Any]]:
    return sorted(snapshot.jobs, key=lambda job: job["start_time"] or 0)[-MOST_JOBS:]


def _waiting(load: dict[str, Any]) -> list[tuple[dict[str, float], int]]:
    """Bundles of resources that wait for a place, each with how many of them wait."""
    bundles = [(bundle, count) for bundle, count in load.get("resourceDemand", [])]
    for group, count in load.get("pgDemand", []):
        bundles += [(bundle, int(number) * count) for bundle, number in group.get("bundles", [])]
    return bundles


def _unmet_demands(load: dict[str, Any]) -> list[str]:
    found = []
    for bundle, count in _waiting(load):
        for name, amount in bundle.items():
            total = load.get("usage", {}).get(name, [0, 0])[1]
            if amount > total:
                found.append(f"{count} × {amount:g} {name} is asked for, and the cluster has {total:g} {name} in all")
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
