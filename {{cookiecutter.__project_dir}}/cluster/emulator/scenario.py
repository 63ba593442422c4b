"""`inv rehearse`: the whole life of a cluster on AWS, inside the emulated cloud, as a timeline.

The cluster runs cluster.yaml as it stands. One thing differs while it runs: when the work is done, the head is told a
shorter idle timeout, so that nobody waits five minutes to see workers leave.
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

from rich.console import Console
from rich.table import Table

import settings
from cluster import submission
from cluster.aws import ssh
from cluster.aws.target import Aws
from cluster.common import bucket, cluster_file, instances
from cluster.common.cluster_file import ClusterFile
from cluster.emulator.addresses import CONTROL_PORT
from demo import assets

CONTROL = f"http://127.0.0.1:{CONTROL_PORT}"
RECORD = settings.PROJECT / "results" / "rehearsal.json"
WORKERS = 2
IDLE_TIMEOUT_MINUTES = 0.2
TRAINING = [
    *("--model", "models/tiny", "--name", "rehearsal", "--fresh"),
    *("--num-workers", str(WORKERS), "--cpus-per-worker", "60"),  # of 96: one worker a machine, as a gang has it
    *("--device", "cpu", "--precision", "fp32"),  # the emulated GPUs are a number in Ray's books
    *("--steps", "20", "--warmup-steps", "5", "--learning-rate", "3e-3", "--checkpoint-every", "10"),
    *("--keep-checkpoints", "1"),
    *("--global-batch-rows", "16", "--micro-batch-rows", "8"),
]
CONSOLE = Console(highlight=False)


def play() -> None:
    """The play inside the cloud.

    Raises:
        settings.UserError: a step failed, or something is left at the end.
    """
    file, target, began = cluster_file.load(), Aws(), time.time()
    with ThreadPoolExecutor(1) as background:
        with _step("prepare: roles, security group, launch templates, bucket, key pair"):
            target.prepare()
        uploading = background.submit(upload_assets, file)
        with _step("up: the real `ray up`"):
            target.up(yes=True)
        uploading.result()
    with _step(f"a fine-tuning on {WORKERS} A100 machines, which come for it"):
        connection = target.connect()
        job = submission.submit(connection, "finetune_ddp", TRAINING)
        if submission.follow(connection, job):
            raise settings.UserError(
                f"{job} failed for the reason above; cluster.yaml or the job is not ready for AWS."
            )
    with _step("idle machines leave"):
        shorten_idle_timeout(file)
        _wait_until_alone(file)
    policies = _policies(file)
    with _step("down: everything of this project ends"):
        left = target.down()
    seen = state()
    _show_timeline(seen["events"], seen["instances"], began)
    _show_calls(seen["calls"])
    _save(seen | {"policies": policies, "left": left})
    if left:
        raise settings.UserError(f"still there after down: {', '.join(left)}")


@contextmanager
def _step(title: str) -> Iterator[None]:
    CONSOLE.print(f"\n[bold]{title}[/]")
    started = time.monotonic()
    yield
    CONSOLE.print(f"[dim]{time.monotonic() - started:.0f} s[/]")


def upload_assets(file: ClusterFile) -> None:
    """A tiny model and packed rows for it, where the cluster reads them."""
    client, name = file.client("s3"), bucket.name(file)
    with tempfile.TemporaryDirectory() as folder:
        rows, model, packed = f"{folder}/rows", f"{folder}/models/tiny", f"{folder}/data/packed"
        assets.write_data(Path(rows))
        assets.write_model(Path(model))
        options = ["--input", f"{rows}/*.jsonl", "--output", packed, "--model", model]
        packing = subprocess.run(
            [sys.executable, "-m", "jobs.preprocess", *options],
            cwd=settings.PROJECT,
            env=os.environ | {"PROFILE": "local"},
            capture_output=True,
            text=True,
        )
        if packing.returncode:
            raise settings.UserError(f"preprocess failed: {packing.stderr.strip().splitlines()[-1]}")
        for path in Path(folder).rglob("*"):
            if path.is_file():
                client.upload_file(str(path), name, str(path.relative_to(folder)))


def shorten_idle_timeout(file: ClusterFile) -> None:
    """The autoscaler reads this file anew in each of its loops."""
    edit = f's/"idle_timeout_minutes": [0-9.]+/"idle_timeout_minutes": {IDLE_TIMEOUT_MINUTES}/'
    ssh.find_head(file).run(f"sed -i -E '{edit}' ~/ray_bootstrap_config.yaml")


def _wait_until_alone(file: ClusterFile, patience_s: float = 120) -> None:
    started = time.monotonic()
    while len(instances.living(file)) > 1:
        if time.monotonic() - started > patience_s:
            raise settings.UserError(f"workers were idle for {patience_s:.0f} s and did not leave.")
        time.sleep(1)


def state() -> dict[str, Any]:
    with urllib.request.urlopen(CONTROL) as answer:
        return json.load(answer)


def _policies(file: ClusterFile) -> dict[str, list[dict[str, Any]]]:
    """The statements of each role, with every name that the stack filled in."""
    iam = file.client("iam")
    statements: dict[str, list[dict[str, Any]]] = {}
    for role in (f"{file.slug}-head", f"{file.slug}-worker"):
        names = iam.list_role_policies(RoleName=role)["PolicyNames"]
        documents = [iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"] for name in names]
        statements[role] = [statement for document in documents for statement in document["Statement"]]
    return statements


def _save(record: dict[str, Any]) -> None:
    """For who wants to look closer: every call with its caller and the permissions that it took."""
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1))
    CONSOLE.print(f"every call: {RECORD.relative_to(settings.PROJECT)}")


def _show_timeline(events: list[dict[str, Any]], instances: list[dict[str, Any]], began: float) -> None:
    table = Table(title="What happened when", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("at", "machine", "what"):
        table.add_column(column, header_style="dim", justify="right" if column == "at" else "left")
    names = {one["id"]: one["tags"].get("ray-user-node-type", "") for one in instances}
    for event in sorted(events, key=lambda event: event["at"]):
        table.add_row(f"{event['at'] - began:.0f} s", names.get(event["instance"], ""), event["what"])
    CONSOLE.print("\n", table)


def _show_calls(calls: list[dict[str, Any]]) -> None:
    """What AWS was asked, and by whom."""
    table = Table(title="What AWS was asked", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("by", "service", "calls"):
        table.add_column(column, header_style="dim", overflow="fold")
    asked: dict[tuple[str, str], Counter[str]] = {}
    for call in calls:
        caller = re.sub(r"/i-\w+$", "", call["caller"].rpartition(":")[2]) or "nobody known"
        action = call["action"].partition(" ")[0] if call["service"] == "s3" else call["action"]
        refused = f" ({call['refused']})" if call["refused"] else ""
        asked.setdefault((caller, call["service"]), Counter())[action + refused] += 1
    for (caller, service), actions in sorted(asked.items()):
        listed = ", ".join(f"{action} ×{count}" if count > 1 else action for action, count in sorted(actions.items()))
        table.add_row(caller, service, listed)
    CONSOLE.print(table)


if __name__ == "__main__":
    try:
        play()
    except settings.UserError as refusal:
        sys.exit(f"error: {refusal}")
