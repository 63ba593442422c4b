"""Test that logs reach the bucket while they grow, and that `inv` shows them when there is no cluster."""

import dataclasses
import datetime
import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
import pytest
from processes import verb_command
from rich.console import Console

from raymill import settings, status
from raymill.aws import cloud_status
from raymill.aws.past_jobs import PastJobs
from raymill.common import bucket, cluster_file, instances, prices
from raymill.common.instances import Instance
from raymill.network import free_ports
from raymill.node import gpu_use, log_shipping, metadata, ray_jobs, state

JOB: dict[str, Any] = {
    "submission_id": "preprocess-1", "entrypoint": "python -m jobs.preprocess", "status": "RUNNING", "message": "runs",
    "start_time": 1_000, "end_time": None, "driver_exit_code": None, "metadata": {"owner": "ada"},
    "runtime_env": {"env_vars": {"KEY": "hidden"}},
}  # fmt: skip
DONE = JOB | {"status": "SUCCEEDED", "end_time": 61_000, "driver_exit_code": 0}
FAILED = DONE | {"submission_id": "evaluate-2", "status": "FAILED", "start_time": 2_000, "driver_exit_code": 3}
PROGRAM = {"submission_id": None}
LOG = "job-driver-preprocess-1.log"
TAKE_OVER = """
import time
from raymill.node import process
process.take_over("pretended")
print("took over", flush=True)
time.sleep(600)
"""


class Node:
    """A node with an empty Ray session."""

    def __init__(self, folder: Path, objects: Any) -> None:
        self._folder, self._objects = folder, objects
        self.jobs = [JOB, PROGRAM]
        self.start_session("session_2026-01-01_10-00-00_1_1")

    def start_session(self, name: str) -> None:
        self.session = name
        (self._folder / name / "logs").mkdir(parents=True)
        log_shipping.SESSION.unlink(missing_ok=True)
        log_shipping.SESSION.symlink_to(self._folder / name)

    def log(self, name: str) -> Path:
        return self._folder / self.session / "logs" / name

    def copies(self) -> dict[str, str]:
        """Return the content of each object below LOGS."""
        found = self._objects.filter(Prefix=bucket.LOGS)
        return {one.key.removeprefix(bucket.LOGS): one.get()["Body"].read().decode() for one in found}

    def copy(self, name: str) -> str:
        return self.copies()[f"{self.session}/head/{name}"]


@pytest.fixture
def node(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    own = boto3.resource("s3").Bucket(bucket.name(cluster_file.load()))
    if not bucket.exists(cluster_file.load()):  # another test may have made it
        own.create()
    for module, name in (
        *((log_shipping, name) for name in ("SESSION", "LOG_FILE")),
        *((ray_jobs, "TOKEN_FILE"), (state, "LOG_FILE"), (gpu_use, "FILE"), (gpu_use, "LAST_FILE")),
    ):
        monkeypatch.setattr(module, name, tmp_path / f"{module.__name__}.{name}")
    monkeypatch.setattr(metadata, "read", lambda path: "i-head")
    ray_jobs.TOKEN_FILE.write_text("token\n")
    for log in (state.LOG_FILE, log_shipping.LOG_FILE, gpu_use.FILE):
        log.write_text(f"from {log.name}\n")
    made = Node(tmp_path, own.objects)
    with dashboard(made) as url:
        monkeypatch.setattr(ray_jobs, "URL", url)
        yield made
    own.objects.filter(Prefix=bucket.LOGS).delete()


@contextmanager
def dashboard(node: Node) -> Iterator[str]:
    """Answer like Ray's dashboard, and yield the URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == "Bearer token" else 401)
            self.end_headers()
            self.wfile.write(json.dumps(node.jobs).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_growing_log_reaches_the_bucket(node: Node) -> None:
    shipper = log_shipping.LogShipper("head")
    text = ""
    for step in range(3):
        text += f"step {step}\n"
        node.log(LOG).write_text(text)
        shipper.ship()
        assert node.copy(LOG) == text
    assert node.copy(state.LOG_FILE.name) == f"from {state.LOG_FILE.name}\n"
    assert node.copy(gpu_use.FILE.name) == f"from {gpu_use.FILE.name}\n"


def test_a_log_that_has_not_changed_is_not_copied_again(node: Node) -> None:
    shipper = log_shipping.LogShipper("head")
    node.log(LOG).write_text("step 1\n")
    shipper.ship()
    boto3.client("s3").delete_object(
        Bucket=bucket.name(cluster_file.load()), Key=f"{bucket.LOGS}{node.session}/head/{LOG}"
    )
    shipper.ship()
    assert f"{node.session}/head/{LOG}" not in node.copies()


def test_a_truncated_log_and_a_rotated_log_are_whole(node: Node) -> None:
    shipper = log_shipping.LogShipper("head")
    node.log("raylet.out").write_text("old\n" * 100)
    node.log("monitor.log").write_text("a long first text\n")
    shipper.ship()
    node.log("raylet.out").rename(node.log("raylet.out.1"))
    node.log("raylet.out").write_text("new\n")
    node.log("monitor.log").write_text("short\n")
    shipper.ship()
    assert node.copy("raylet.out.1") == "old\n" * 100
    assert node.copy("raylet.out") == "new\n"
    assert node.copy("monitor.log") == "short\n"


def test_of_a_large_log_the_last_lines_are_copied(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_shipping, "MAX_BYTES", 40)
    node.log(LOG).write_text("".join(f"step {step}\n" for step in range(100)))
    log_shipping.LogShipper("head").ship()
    assert node.copy(LOG) == "[this copy lacks the beginning of the log]\nstep 96\nstep 97\nstep 98\nstep 99\n"


def test_logs_that_may_contain_environment_variables_are_not_copied(node: Node) -> None:
    for name in ("runtime_env_setup-01.log", "runtime_env_agent.log", "dashboard_agent.log", "agent-1.out"):
        node.log(name).write_text("KEY=hidden\n")
    node.log("worker-1-01-2.out").write_text("at work\n")
    log_shipping.LogShipper("head").ship()
    assert node.copy("worker-1-01-2.out") == "at work\n"
    assert [job["submission_id"] for job in json.loads(node.copy(log_shipping.JOBS))] == ["preprocess-1"]
    assert not [name for name, text in node.copies().items() if "hidden" in text]


def test_each_node_and_each_session_has_its_own_folder(node: Node) -> None:
    node.log("raylet.out").write_text("first\n")
    head, worker = log_shipping.LogShipper("head"), log_shipping.LogShipper("worker")
    head.ship()
    worker.ship()
    before = node.copies()
    node.start_session("session_2026-01-02_10-00-00_1_1")
    node.log("raylet.out").write_text("again\n")
    head.ship()
    worker.ship()
    assert before.items() < node.copies().items()
    folders = sorted({name.rpartition("/")[0] for name in node.copies()})
    host = os.uname().nodename
    assert folders == sorted(f"session_2026-01-0{day}_10-00-00_1_1/{name}" for day in (1, 2) for name in ("head", host))
    assert not [name for name in node.copies() if name.endswith(f"{host}/{log_shipping.JOBS}")]


def test_while_s3_does_not_answer_nothing_is_lost(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    shipper = log_shipping.LogShipper("head")
    node.log(LOG).write_text("step 1\n")
    with monkeypatch.context() as dead:
        dead.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
        dead.setattr(boto3, "DEFAULT_SESSION", None)
        dead.setenv("AWS_MAX_ATTEMPTS", "1")
        with pytest.raises(botocore.exceptions.EndpointConnectionError):
            shipper.ship()
    shipper.ship()
    assert node.copy(LOG) == "step 1\n"


def test_without_a_cluster_inv_shows_logs_and_jobs_of_the_bucket(node: Node) -> None:
    node.jobs = [FAILED, DONE]
    node.log(LOG).write_text("packed 3 rows\n")
    log_shipping.LogShipper("head").ship()
    node.start_session("session_2026-01-02_10-00-00_1_1")
    node.jobs = [FAILED | {"submission_id": "tune-3", "start_time": 3_000}]
    node.log("job-driver-tune-3.log").write_text("error: no data\n")
    log_shipping.LogShipper("head").ship()

    older = inv("logs", "preprocess-1")
    assert (older.stdout, older.returncode) == ("packed 3 rows\n", 0)
    assert "preprocess-1: succeeded. This is the copy of its log in the bucket, saved at" in older.stderr
    latest = inv("logs")
    assert (latest.stdout, latest.returncode) == ("error: no data\n", 3)
    assert "no cluster" in inv("logs", "preprocess-9").stderr
    table = inv("status", "--past").stdout
    assert [line.split()[:3] for line in table.splitlines()[2:]] == [
        ["preprocess-1", "ada", "succeeded"],
        ["evaluate-2", "ada", "failed"],
        ["tune-3", "ada", "failed"],
    ]
    assert "60 s" in table


def inv(*words: str) -> subprocess.CompletedProcess[str]:
    command = verb_command(*words, "--target", "aws")
    variables = os.environ | {"COLUMNS": "160"}
    return subprocess.run(command, cwd=settings.PROJECT, env=variables, capture_output=True, text=True)


def test_a_job_that_ran_until_its_cluster_ended(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    log_shipping.LogShipper("head").ship()
    (running,) = PastJobs(cluster_file.load()).latest()
    assert running.state == "running"
    monkeypatch.setattr(state, "SILENT_S", -1.0)
    (ended,) = PastJobs(cluster_file.load()).latest()
    assert (ended.state, ended.exit_code) == ("ended with the cluster", 1)


def test_past_jobs_show_how_busy_the_gpus_were(node: Node) -> None:
    lines = [f"1970-01-01T00:00:{second}+00:00,0,{busy},5,40960\n" for second, busy in ((10, 90), (50, 70))]
    gpu_use.FILE.write_text(gpu_use.HEADER + "".join(lines) + "1970-01-01T00:02:00+00:00,0,0,5,40960\n")
    node.jobs = [DONE, DONE | {"submission_id": "evaluate-2", "start_time": 200_000, "end_time": 260_000}]
    log_shipping.LogShipper("head").ship()
    log_shipping.LogShipper("worker").ship()
    console = Console(file=io.StringIO(), width=160)
    status.show_past(PastJobs(cluster_file.load()).latest(), console)
    first, second = console.file.getvalue().splitlines()[2:]  # type: ignore[attr-defined]
    assert re.search(r"60 s +80 % +python -m", first)
    assert re.search(r"60 s +python -m", second), "no sample was taken while it ran"


@pytest.fixture
def shown(node: Node, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], str]:
    """Return a function that returns what `inv status` shows of the nodes some seconds from now."""
    file = cluster_file.load()
    living = [instance("i-head", file.head.name), instance("i-worker", "gpu-spot-1"), instance("i-new", "gpu-spot-1")]
    monkeypatch.setattr(instances, "living", lambda file: living)
    monkeypatch.setattr(instances, "failed_launches", lambda file: [])
    monkeypatch.setattr(prices, "find", lambda file, names: (prices.MarketPrices(dict.fromkeys(names, 10.0), {}), ""))

    def show(seconds: float) -> str:
        head_status = {
            **{"at": time.time() + seconds, "session": node.session, "autoscaler": 1, "watchdog": {"runs": True}},
            "nodes": [{"instance": joined, "address": ""} for joined in ("i-head", "i-worker")],
            **{name: [] for name in ("pending", "demands", "refused", "failed_setups")},
        }
        cloud = cloud_status.cloud_status(file, head_status)
        console = Console(file=io.StringIO(), width=160)
        console.print(*cloud.tables, *cloud.notes, *cloud.problems, sep="\n", soft_wrap=True)
        return console.file.getvalue()  # type: ignore[attr-defined]

    return show


def instance(name: str, node_type: str) -> Instance:
    launched = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    return Instance(name, node_type, "p4d.24xlarge", "", "spot", "z", "running", "", "10.0.0.7", launched, {}, "", "")


def ship(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy the logs of i-head or of i-worker."""
    monkeypatch.setattr(metadata, "read", {"instance-id": f"i-{role}"}.__getitem__)
    log_shipping.LogShipper(role).ship()


def record_gpus(busy: list[tuple[int, int]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record a sample of two GPUs for each pair of percentages."""
    answers = [f"0, {first}, 30720, 40960\n1, {second}, 5120, 40960\n" for first, second in busy]
    (folder / "answers").write_text("".join(answers))
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nhead -n 2 {folder}/answers\nsed -i 1,2d {folder}/answers\n")
    program.chmod(0o755)
    with monkeypatch.context() as machine:
        machine.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        machine.setattr(gpu_use, "time", Naps(len(busy)))
        with pytest.raises(InterruptedError):
            gpu_use.record()


def test_status_shows_the_gpus_of_each_machine(
    shown: Callable[[float], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship("head", monkeypatch)
    record_gpus([(3, 97)], tmp_path, monkeypatch)
    ship("worker", monkeypatch)
    assert re.search(r"i-worker +2 +3 to 97 % +5 to 30 of 40 GiB +5\d s ago", text := shown(50))
    assert text.count("GiB") == 1, "the head has no GPUs, and i-new has not joined"
    assert "minutes, GPU" not in text


def test_status_names_gpus_that_have_been_idle_for_fifteen_minutes(
    shown: Callable[[float], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_gpus([(3, 97)] * 14, tmp_path, monkeypatch)
    ship("worker", monkeypatch)
    assert "minutes, GPU" not in shown(0)
    record_gpus([(50, 97)] + [(10, 97)] * 16, tmp_path, monkeypatch)
    ship("worker", monkeypatch)
    assert "i-worker: for 16 minutes, GPU 0 has not been busy for more than 10 % of the time" in shown(0)


def test_status_names_a_node_whose_logs_do_not_reach_the_bucket(
    shown: Callable[[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ship("head", monkeypatch)
    ship("worker", monkeypatch)
    assert "has not copied" not in shown(100)
    text = shown(190)  # as if both processes had died then
    tail = f"tail {log_shipping.LOG_FILE.name}"
    command = f'inv ssh --target aws --command "{tail}"'
    assert (
        f"i-head has not copied its logs to the bucket for 3 min, so they will be lost. To see why: {command}" in text
    )
    assert "i-worker has not copied its logs to the bucket for 3 min" in text
    assert f"ray_bootstrap_key.pem 10.0.0.7 {tail}" in text
    assert "i-new has not copied" not in text


def test_status_says_why_ec2_ended_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "Client.VolumeLimitExceeded"
    ended = dataclasses.replace(instance("i-1", "gpu-1"), end_code=code, end_reason=f"{code}: Volume limit exceeded")
    monkeypatch.setattr(instances, "_find", lambda file, states: [ended] if states == ["terminated"] else [])
    (failed,) = instances.failed_launches(cluster_file.load())
    assert cloud_status.describe_failed_launch(failed).startswith(
        "AWS ended i-1 (gpu-1) during its launch: Client.VolumeLimitExceeded: Volume limit exceeded. Delete volumes"
    )


def test_status_names_a_node_that_has_never_copied_its_logs(
    shown: Callable[[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ship("head", monkeypatch)
    assert "i-worker has not copied its logs to the bucket yet" in shown(0)
    monkeypatch.setattr(cloud_status, "NEW_S", 7200)
    assert "has not copied" not in shown(0)


def test_gpu_use_is_a_table_with_a_line_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_use, "FILE", tmp_path / "gpu_use.csv")
    monkeypatch.setattr(gpu_use, "LAST_FILE", tmp_path / "gpu_use.json")
    monkeypatch.setattr(gpu_use, "QUERY", ["printf", "0, 97, 30000, 40960\n1, 0, 5, 40960\nNo devices\n"])
    monkeypatch.setattr(gpu_use, "time", Naps(2))
    with pytest.raises(InterruptedError):
        gpu_use.record()
    header, *lines = gpu_use.FILE.read_text().splitlines()
    assert header == "time,gpu,busy_percent,memory_used_mib,memory_total_mib"
    assert [line.partition(",")[2] for line in lines] == ["0,97,30000,40960", "1,0,5,40960"] * 2
    monkeypatch.setattr(gpu_use, "QUERY", ["no-such-program"])
    assert gpu_use.sample() == []


class Naps:
    """Replaces the module `time`. The last of `count` calls of `sleep` raises InterruptedError."""

    def __init__(self, count: int) -> None:
        self._left = count

    def sleep(self, seconds: float) -> None:
        self._left -= 1
        if not self._left:
            raise InterruptedError


@pytest.mark.parametrize(
    "earlier", ["raymill.node.pretended", "cluster.node.pretended"]
)  # the second: before an upgrade
def test_a_restarted_process_ends_the_earlier_one(tmp_path: Path, earlier: str) -> None:
    first, second = take_over(tmp_path, earlier), take_over(tmp_path)
    assert first.wait(30) < 0
    assert second.poll() is None
    second.kill()
    second.wait()


def take_over(home: Path, module: str = "raymill.node.pretended") -> subprocess.Popen[str]:
    """Start a process that takes over, and return it when it has."""
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_OVER, module],
        cwd=settings.PROJECT,
        env=os.environ | {"HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "took over\n"
    return process
