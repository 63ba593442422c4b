"""Run the full life cycle of an AWS cluster inside the emulated cloud, and show a timeline. `inv rehearse` runs this.

The cluster uses cluster.yaml unchanged. After the training run, the idle timeout on the head is shortened, so that
idle workers are terminated within seconds instead of minutes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from rich.table import Table

from raymill import settings, status, submission
from raymill.aws import head, node_reports, ssh
from raymill.aws.target import Aws
from raymill.common import bucket, cluster_file, instances
from raymill.common.cluster_file import ClusterFile
from raymill.console import Console
from raymill.demo import assets
from raymill.emulator.addresses import CONTROL_PORT
from raymill.emulator.waiting import wait_for
from raymill.errors import UserError
from raymill.job_context import JobContext
from raymill.target import Connection

CONTROL_URL = f"http://127.0.0.1:{CONTROL_PORT}"
RECORD_FILE = settings.PROJECT / "results" / "rehearsal.json"
WORKERS = 2
STEPS = 20
SHORT_IDLE_MINUTES = 0.2
TRAINING = [
    *("--model", "models/tiny", "--name", "rehearsal", "--fresh"),
    *("--num-workers", str(WORKERS), "--cpus-per-worker", "60"),  # of 96 CPUs, so each worker needs its own machine
    *("--device", "cpu", "--precision", "fp32"),  # the emulated GPUs cannot compute
    *("--steps", str(STEPS), "--warmup-steps", "5", "--learning-rate", "3e-3", "--checkpoint-every", "10"),
    *("--keep-checkpoints", "1"),
    *("--global-batch-rows", "16", "--micro-batch-rows", "8"),
]
CONSOLE = Console(highlight=False)


def run() -> None:
    """Run the scenario inside the cloud.

    Raises:
        UserError: a step failed, or something remains after `down`.
    """
    file, target, started = cluster_file.load(), Aws(), time.time()
    with ThreadPoolExecutor(1) as background:
        uploading = background.submit(upload_assets, file)
        with _step("prepare: roles, security group, launch templates, bucket, key pair"):
            target.prepare()
        with _step("up: the real `ray up`"):
            target.up(yes=True)
        with _step("bake: store the head's packages, which the workers unpack"):
            target.bake()
        uploading.result()
    with _step(f"fine-tune on {WORKERS} GPU machines, which the autoscaler starts"):
        connection = target.connect()
        job = submission.submit(connection, "finetune_ddp", TRAINING)
        if submission.follow(connection, job):
            raise UserError(f"{job} failed; its log is above. Fix the job or cluster.yaml before you use AWS.")
    _check_unpacked(file)
    with _step("reports and metrics of all machines, as `inv status` and `inv metrics` read them"):
        wait_for(lambda: _reporting(file) == {one.id for one in instances.living(file)}, 60, "the machines' reports")
        read_metrics(connection)
    with _step("plain ssh, with the host that `inv ssh --config` adds"):
        target.configure_ssh()
        _check_plain_ssh(file, works=True)
    with _step("idle machines leave"):
        set_idle_timeout(file, SHORT_IDLE_MINUTES)
        wait_for(lambda: len(instances.living(file)) == 1, 120, "the idle workers to leave")
    policies = _policies(file)
    with _step("down: delete everything on AWS except the bucket"):
        left = target.down()
        _check_plain_ssh(file, works=False)
    with _step("without a cluster: past jobs and logs, from the bucket"):
        status.show_past(target.past_jobs(), CONSOLE)
        log = target.past_log(job)
        if not (log and log.copy and f"step {STEPS}/{STEPS}" in log.copy.text):
            raise UserError(f"the log of {job} in the bucket is not whole. Check raymill/node/log_shipping.py")
    state = cloud_state()
    _show_timeline(state["events"], state["instances"], started)
    _show_calls(state["calls"])
    _save(state | {"policies": policies, "left": left})
    if left:
        raise UserError(f"left behind after down: {', '.join(left)}")


@contextmanager
def _step(title: str) -> Iterator[None]:
    CONSOLE.print(f"\n[bold]{title}[/]")
    started = time.monotonic()
    yield
    CONSOLE.print(f"[dim]{time.monotonic() - started:.0f} s[/]")


def _reporting(file: ClusterFile) -> set[str]:
    """Return the ids of the instances that have reported to the bucket."""
    return set(node_reports.read(file, head.read_status(ssh.find_head(file))["session"]))


def read_metrics(connection: Connection) -> None:
    """Read the metrics of each machine as Prometheus does, through the relay.

    Raises:
        UserError: not all machines answer.
    """
    relay, headers = connection.relay_metrics(), connection.headers
    nodes = requests.get(f"{connection.dashboard}/api/prometheus/sd", headers=headers, timeout=30).json()
    targets = [target for node in nodes for target in node["targets"]]
    pages = [requests.get(f"http://{relay}/{target}", headers=headers, timeout=30).text for target in targets]
    found = {ip for page in pages for ip in re.findall(r'^ray_node_mem_used{.*\bip="([^"]+)"', page, re.MULTILINE)}
    if len(found) != WORKERS + 1:
        raise UserError(
            f"only {len(found)} machines have metrics ({', '.join(found)}). Check raymill/node/metrics_relay.py"
        )
    CONSOLE.print(f"{len(found)} machines have metrics")


def _check_plain_ssh(file: ClusterFile, *, works: bool) -> None:
    """Check whether ssh without options reaches the head by the cluster's name, as VS Code and scp do."""
    shown = subprocess.run(["ssh", file.slug, "hostname"], capture_output=True, text=True)
    if (shown.returncode == 0) != works:
        raise UserError(
            f"`ssh {file.slug}` {'fails' if works else 'still works'}: {shown.stdout}{shown.stderr}. Check "
            "raymill/aws/ssh.py"
        )
    if works:
        CONSOLE.print(f"ssh {file.slug} reaches {shown.stdout.strip()}")


def upload_assets(file: ClusterFile) -> None:
    """Make a tiny model, and rows packed for it, while CloudFormation works. Upload both when there is a bucket."""
    client, name = file.client("s3"), bucket.name(file)
    with tempfile.TemporaryDirectory() as folder:
        rows, model, packed = f"{folder}/rows", f"{folder}/models/tiny", f"{folder}/data/packed"
        assets.write_data(Path(rows))
        assets.write_model(Path(model))
        options = ["--input", f"{rows}/*.jsonl", "--output", packed, "--model", model]
        packing = subprocess.run(
            [sys.executable, "-m", "jobs.preprocess", *options],
            cwd=settings.PROJECT,
            env=os.environ | JobContext(profile="local").variables(),
            capture_output=True,
            text=True,
        )
        if packing.returncode:
            raise UserError(f"preprocess failed: {packing.stderr.strip().splitlines()[-1]}")
        wait_for(lambda: bucket.exists(file), 120, "the bucket")
        for path in Path(folder).rglob("*"):
            if path.is_file():
                client.upload_file(str(path), name, str(path.relative_to(folder)))


def _check_unpacked(file: ClusterFile) -> None:
    """Check that all workers have unpacked the packages in the bucket, according to the output of their setup."""
    setup = ssh.find_head(file).run("cat /tmp/ray/session_latest/logs/monitor.out")
    if setup.count("of packages from the bucket in") != WORKERS:
        raise UserError("a worker has not unpacked the packages in the bucket. Check raymill/node/unpack.py")


def set_idle_timeout(file: ClusterFile, minutes: float) -> None:
    """Change the idle timeout on the head. The autoscaler rereads its configuration in each iteration of its loop."""
    edit = f's/"idle_timeout_minutes": [0-9.]+/"idle_timeout_minutes": {minutes}/'
    ssh.find_head(file).run(f"sed -i -E '{edit}' ~/ray_bootstrap_config.yaml")


def cloud_state() -> dict[str, Any]:
    """Return the cloud's instances, events, calls and faults (see cloud.ControlApi)."""
    with urllib.request.urlopen(CONTROL_URL) as answer:
        return json.load(answer)


def _policies(file: ClusterFile) -> dict[str, list[dict[str, Any]]]:
    """Return the policy statements of each role, with the stack's parameters filled in."""
    iam = file.client("iam")
    statements: dict[str, list[dict[str, Any]]] = {}
    for role in (file.role("head"), file.role("worker")):
        names = iam.list_role_policies(RoleName=role)["PolicyNames"]
        documents = [iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"] for name in names]
        statements[role] = [statement for document in documents for statement in document["Statement"]]
    return statements


def _save(record: dict[str, Any]) -> None:
    """Save the cloud's state (including all calls to AWS), the roles' policies, and what `down` left behind."""
    RECORD_FILE.parent.mkdir(exist_ok=True)
    RECORD_FILE.write_text(json.dumps(record, indent=1))
    CONSOLE.print(f"record of all calls: {RECORD_FILE.relative_to(settings.PROJECT)}")


def _show_timeline(events: list[dict[str, Any]], instances: list[dict[str, Any]], started: float) -> None:
    table = Table(title="Timeline", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("at", "machine", "event"):
        table.add_column(column, header_style="dim", justify="right" if column == "at" else "left")
    names = {one["id"]: one["tags"].get("ray-user-node-type", "") for one in instances}
    for event in sorted(events, key=lambda event: event["at"]):
        table.add_row(f"{event['at'] - started:.0f} s", names.get(event["instance"], ""), event["what"])
    CONSOLE.print("\n", table)


def _show_calls(calls: list[dict[str, Any]]) -> None:
    """Show the calls to AWS by caller and service."""
    table = Table(title="Calls to AWS", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("caller", "service", "calls"):
        table.add_column(column, header_style="dim", overflow="fold")
    counts: dict[tuple[str, str], Counter[str]] = {}
    for call in calls:
        caller = re.sub(r"/i-\w+$", "", call["caller"].rpartition(":")[2]) or "unknown"
        action = call["action"].partition(" ")[0] if call["service"] == "s3" else call["action"]
        error = f" ({call['error_code']})" if call["error_code"] else ""
        counts.setdefault((caller, call["service"]), Counter())[action + error] += 1
    for (caller, service), actions in sorted(counts.items()):
        listed = ", ".join(f"{action} ×{count}" if count > 1 else action for action, count in sorted(actions.items()))
        table.add_row(caller, service, listed)
    CONSOLE.print(table)


if __name__ == "__main__":
    try:
        run()
    except UserError as error:
        sys.exit(f"error: {error}")
