"""Measures what grows with the number of workers: calls to AWS, the head's memory, and the seconds of `inv status`.

The workers are Ray's processes on this machine, and instances of the emulated AWS. They run no jobs. Ray's autoscaler
does not run: it describes all instances in each of its loops, as the watchdog does.
"""

import io
import itertools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import psutil
from moto.backends import get_backend
from moto.iam.models import iam_backends
from ray.cluster_utils import Cluster
from rich.console import Console
from werkzeug.serving import WSGIRequestHandler, make_server

from benchmarks import harness
from benchmarks.report import Result, at_most
from raymill import status
from raymill.aws import cloud_status, identity, launcher_file, prepare
from raymill.common import cluster_file
from raymill.common.cluster_file import ClusterFile
from raymill.emulator import moto_instances
from raymill.emulator.api import Api
from raymill.emulator.consistency import Consistency
from raymill.emulator.moto_instances import ACCOUNT, IMAGE
from raymill.network import free_ports
from raymill.node import gpu_use, log_shipping, metadata, state, watchdog_head
from raymill.target import Connection

WORKERS = (2, 16, 64)
SESSION = "session_2026-01-01_10-00-00_1_1"
ALLOW_ALL = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}'
SETTLE_S = 15.0
"""Time after the last node has joined. Each node reports to the dashboard every few seconds."""
QUOTA_PER_MINUTE = 20 * 60
"""EC2 refills 20 tokens per second for calls that only read.
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/throttling.html"""


def measure() -> Result:
    """Measure each size of cluster."""
    rows = []
    for workers in WORKERS:
        row = {"workers": workers, **_measure_aws(workers), **_measure_ray(workers)}
        print(json.dumps(row), flush=True)
        rows.append(row)
    largest = rows[-1]
    return {
        "bars": [
            at_most(QUOTA_PER_MINUTE, "64 workers: calls to EC2 per minute", largest["EC2 calls/min"]),
            at_most(8, "64 workers: GiB of the head's memory for Ray", largest["head GiB"]),
            at_most(10, "64 workers: seconds of inv status", largest["status s"]),
            at_most(state.INTERVAL_S, "64 workers: seconds of one round of the watchdog", largest["watchdog s"]),
        ],
        "rounds": rows,
    }


# ------------------------------------------------------------------------------------------ AWS


def _measure_aws(workers: int) -> dict[str, float]:
    """Return the calls per minute of the watchdog and of log shipping, and what `inv status` needs of AWS."""
    with harness.scratch() as folder, _emulated_aws(folder) as api:
        file = launcher_file.load()
        prepare.prepare(file)
        instances = _launch(file, workers)
        _be_a_head(folder, file)
        watchdog = watchdog_head.HeadWatchdog(file)
        watchdog.check()  # asks for prices
        watchdog_s, watchdog_calls = _calls(api, watchdog.check)
        shippers = [_shipper(folder, number, instance) for number, instance in enumerate(instances)]

        def ship_all() -> None:
            for number, shipper in enumerate(shippers):
                log_shipping.SESSION = folder / str(number) / SESSION
                with (log_shipping.SESSION / "logs/worker-1.out").open("a") as log:
                    log.write("step 2\n")
                shipper.ship()

        _, shipping_calls = _calls(api, ship_all)
        head_status = {
            **{"at": time.time(), "session": SESSION, "watchdog": {"runs": True}, "autoscaler": 1},
            **{name: [] for name in ("pending", "demands", "refused", "failed_setups")},
            "nodes": [{"instance": one, "type": "gpu", "address": ""} for one in instances],
        }
        status_s, status_calls = _calls(api, lambda: cloud_status.cloud_status(file, head_status))
    per_minute = 60 / state.INTERVAL_S
    return {
        "EC2 calls/min": watchdog_calls["ec2"] * per_minute,
        "watchdog s": watchdog_s,
        "S3 calls/min": shipping_calls["s3"] * 60 / log_shipping.INTERVAL_S,
        "status calls": status_calls.total(),
        "AWS part of status s": status_s,
    }


@contextmanager
def _emulated_aws(folder: Path) -> Iterator[Api]:
    """Serve an emulated AWS with an empty account, and let boto3 use it."""
    for service in ("ec2", "iam", "cloudformation", "lambda", "scheduler", "s3"):
        for account in get_backend(service).values():
            account.reset()
    api = Api()
    api.consistency = Consistency(itertools.count(step=1000.0).__next__)  # so that every effect is visible at once
    file = cluster_file.load()
    moto_instances.publish_image(file.region, IMAGE)
    users = iam_backends[ACCOUNT]["aws"]
    users.create_user(file.region, "laptop")
    users.put_user_policy("laptop", "all", ALLOW_ALL)
    key = users.create_access_key("laptop")
    server = make_server("127.0.0.1", 0, api, threaded=True, request_handler=WSGIRequestHandler)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    before = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": key.access_key_id,
        "AWS_SECRET_ACCESS_KEY": key.secret_access_key,
        "HOME": str(folder),  # for the private key
    }
    boto3.DEFAULT_SESSION = None  # it has the credentials of the last account
    launcher_file.FILE = folder / "cluster.yaml"
    identity.FOLDER = folder
    prepare._own_address = lambda: "203.0.113.7"
    try:
        yield api
    finally:
        server.shutdown()
        os.environ.clear()
        os.environ |= before


def _launch(file: ClusterFile, workers: int) -> list[str]:
    """Launch the head and the workers as Ray does, and return the ids of the workers."""
    ec2 = file.client("ec2")
    on_demand = next(one for one in file.workers if one.name.startswith("gpu-on-demand"))
    ids: list[str] = []
    for node_type, count in ((file.head, 1), (on_demand, workers)):
        template = node_type.node_config["LaunchTemplate"]
        versions = ec2.describe_launch_template_versions(
            LaunchTemplateName=template["LaunchTemplateName"], Versions=[template["Version"]]
        )["LaunchTemplateVersions"]
        config = node_type.node_config | {"ImageId": IMAGE} | versions[0]["LaunchTemplateData"]
        tags = [{"Key": "ray-project", "Value": file.slug}, {"Key": "ray-user-node-type", "Value": node_type.name}]
        config["TagSpecifications"] = [{"ResourceType": "instance", "Tags": tags}]
        ids = [one["InstanceId"] for one in ec2.run_instances(**config, MinCount=count, MaxCount=count)["Instances"]]
    return ids


def _be_a_head(folder: Path, file: ClusterFile) -> None:
    """Put the watchdog's files into a folder."""
    for name in ("LEASE", "LAUNCHED", "STATE_FILE"):
        setattr(watchdog_head, name, folder / name)
    watchdog_head.LAUNCHED.touch()
    watchdog_head.RAY_CONFIG = folder / "ray.yaml"
    watchdog_head.RAY_CONFIG.write_text(json.dumps(file.content, default=str))


def _shipper(folder: Path, number: int, instance: str) -> log_shipping.LogShipper:
    """Return the log shipper of a worker that has copied its logs once."""
    log_shipping.SESSION = folder / str(number) / SESSION
    logs = log_shipping.SESSION / "logs"
    logs.mkdir(parents=True)
    for name in ("raylet.out", "worker-1.out", "worker-1.err"):
        (logs / name).write_text("step 1\n")
    for module, name in ((log_shipping, "LOG_FILE"), (gpu_use, "FILE"), (gpu_use, "LAST_FILE"), (state, "LOG_FILE")):
        setattr(module, name, folder / f"{module.__name__}.{name}")
    shipper = log_shipping.LogShipper("worker")
    shipper._node = f"node-{number}"
    metadata.read = lambda path: instance
    shipper.ship()  # the report's instance is read only once
    return shipper


def _calls(api: Api, work: Callable[[], Any]) -> tuple[float, Counter[str]]:
    """Do the work. Return the seconds that it took, and its number of calls to each service."""
    api.calls.clear()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started, Counter(call.service for call in api.calls)


# ------------------------------------------------------------------------------------------ Ray


def _measure_ray(workers: int) -> dict[str, float]:
    """Return the memory of the head's processes, their share of a core, and the seconds of Ray's part of a status."""
    (port,) = free_ports(1)
    cluster = Cluster()
    store = 100 * 2**20
    head = cluster.add_node(num_cpus=0, include_dashboard=True, dashboard_port=port, object_store_memory=store)
    try:
        started_here = [psutil.Process(info.process.pid) for one in head.all_processes.values() for info in one]
        processes = [*started_here, *(child for one in started_here for child in one.children(recursive=True))]
        for _ in range(workers):
            cluster.add_node(wait=False, num_cpus=1, object_store_memory=store)
        cluster.wait_for_nodes(timeout=1200)
        time.sleep(SETTLE_S)
        cpu_s = _cpu_s(processes)
        time.sleep(SETTLE_S)
        share = (_cpu_s(processes) - cpu_s) / SETTLE_S
        connection = Connection(dashboard=f"http://127.0.0.1:{port}", headers={}, job_variables={})
        started = time.perf_counter()
        found = status.snapshot(connection)
        status.show(found, cloud_status.CloudStatus(), Console(file=io.StringIO()))
        seconds = time.perf_counter() - started
        assert len(found.nodes) == workers + 1
        memory = sum(one.memory_full_info().uss for one in processes if one.is_running())
    finally:
        cluster.shutdown()
    return {"head GiB": memory / 2**30, "head cores": share, "status s": seconds}


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes if one.is_running())


if __name__ == "__main__":
    harness.main(measure)
