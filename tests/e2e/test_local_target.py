"""Test the `inv` verbs with the `local` target, in a copy of the project with its own cluster."""

import functools
import getpass
import hashlib
import json
import os
import pty
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from processes import open_to_others, read_all
from project_copy import Project, copy_project, processes, read_until

from raymill import prometheus
from raymill.job_client import PROBE_JOB, Unreachable
from raymill.local import head, state
from raymill.local import processes as cluster_processes
from raymill.local.target import Local
from raymill.network import free_ports

PROMETHEUS = f"http://127.0.0.1:{prometheus.PORT}/api/v1"
CANARY = secrets.token_hex(16)  # random: this file is uploaded, so the search below would find a literal in it
PROBE = '''
"""A job for the tests: prints temporary folders and hashes of the secret, waits, then exits with the given code."""
import contextlib, hashlib, os, pathlib, sys, tempfile, time
import ray
from raymill import settings
from raymill.job import connect, run
from raymill.ray_support import job_lease

def seen() -> str:
    return hashlib.sha256(os.environ.get("HF_TOKEN", "").encode()).hexdigest()

def main(_) -> None:
    connect()
    writes = len(sys.argv) > 3
    with job_lease.hold(settings.resolve(sys.argv[3]), "--output") if writes else contextlib.nullcontext():
        work()

def work() -> None:
    print("session", pathlib.Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1])
    print("driver", seen())
    print("worker", ray.get(ray.remote(num_cpus=0.1)(seen).remote()), flush=True)
    print("temp", ray.get(ray.remote(num_cpus=0.1)(tempfile.gettempdir).remote()), tempfile.gettempdir(), flush=True)
    if len(sys.argv) > 2:
        waits = ray.remote(num_cpus=1000)(seen).remote()
        time.sleep(float(sys.argv[2]))
    sys.exit(int(sys.argv[1]))

if __name__ == "__main__":
    run(main, None)
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    copy = copy_project(tmp_path_factory.mktemp("copy") / "a b é", PROBE)
    copy.inv("up")
    env_file = copy.folder / ".env"
    env_file.write_text(env_file.read_text().replace("HF_TOKEN=", f"HF_TOKEN={CANARY}"))
    yield copy
    copy.inv("down")


def test_a_second_up_changes_nothing(project: Project) -> None:
    before = project.state
    assert "is already up" in project.inv("up")
    assert project.state == before


def test_a_new_cluster_shows_no_job_and_no_problem(project: Project) -> None:
    # Ray monitors a job for a second after it ends. If the job is deleted before then, Ray lists it as failed.
    time.sleep(3)
    probes = {job["submission_id"]: job["status"] for job in project.get("/api/jobs/").json()}
    assert probes == {PROBE_JOB: "SUCCEEDED"}
    printed = project.inv("status")
    assert "no problems" in printed
    assert "Jobs" not in printed
    assert "no job has been submitted" in project.inv("logs", ok=False)


def test_every_port_is_on_loopback_and_requires_the_token(project: Project) -> None:
    ports = [
        connection.laddr
        for connections in read_all(processes(project), lambda process: process.net_connections("tcp"))
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(ports) > 5
    assert {address.ip.removeprefix("::ffff:") for address in ports} <= {"127.0.0.1", "::1"}
    assert requests.get(project.state["dashboard"] + "/api/jobs/", timeout=15).status_code == 401
    assert (project.folder / ".cluster" / "token").stat().st_mode & 0o077 == 0


@pytest.mark.nightly  # its first sample takes ten seconds
@pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed")
def test_prometheus_collects_the_metrics_of_the_cluster(project: Project) -> None:
    verb = subprocess.Popen([*project.command, "metrics"], cwd=project.folder, stdout=subprocess.PIPE, text=True)
    try:
        assert verb.stdout
        assert f"http://127.0.0.1:{prometheus.PORT}" in verb.stdout.readline()
        deadline = time.monotonic() + 300
        while not query("ray_node_mem_used"):
            assert time.monotonic() < deadline, requests.get(f"{PROMETHEUS}/targets", timeout=15).text
            assert verb.poll() is None
            time.sleep(0.5)
        assert {target["metric"]["job"] for target in query("up == 1")} == {"ray"}
        (program,) = psutil.Process(verb.pid).children()
        (configuration,) = [Path(word.partition("=")[2]) for word in program.cmdline() if "--config.file" in word]
        assert configuration.parent.stat().st_mode & 0o077 == 0, "it holds the token"
        verb.send_signal(signal.SIGHUP)  # as if the terminal were closed
        verb.wait(60)
        assert not program.is_running()
        assert not configuration.exists()
    finally:
        verb.terminate()
        verb.wait(60)
    token = (project.folder / ".cluster" / "token").read_text().encode()
    files = [path for path in (project.folder / ".cluster" / "prometheus").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if token in path.read_bytes()]


def query(expression: str) -> list[dict[str, Any]]:
    """Return Prometheus's answer, or [] while it does not answer."""
    try:
        return requests.get(f"{PROMETHEUS}/query", params={"query": expression}, timeout=15).json()["data"]["result"]
    except requests.RequestException:
        return []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_other_users_cannot_access_files_of_a_running_job(project: Project) -> None:
    open_folder = Path(tempfile.mkdtemp(dir="/tmp"))
    open_folder.chmod(0o777)
    assert open_to_others(open_folder) == [str(open_folder)], "the check must find a folder that is open to others"
    open_folder.rmdir()

    client = subprocess.Popen(
        [*project.command, "submit", "probe", "--", "0", "120", "results/probe"],
        cwd=project.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    job_id = read_until(client, "worker")
    temp = Path(project.state["temp"])
    [log] = temp.rglob(f"job-driver-{job_id}.log")
    assert "worker" in log.read_text()
    assert list(temp.rglob("working_dir_files/*/settings.toml"))
    assert open_to_others(temp) == []
    assert open_to_others(project.folder / ".cluster" / "token") == []
    project.inv("stop", "--job", job_id)
    client.communicate(timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_other_users_cannot_access_files_of_a_job_without_a_cluster(project: Project) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # under `uv run`, Ray would create an empty .venv for its workers
    job = subprocess.Popen(
        [project.python, "-m", "jobs.probe", "0", "2"],
        cwd=project.folder, env=variables, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stdout is not None
    temp = Path(next(line for line in job.stdout if line.startswith("session ")).split()[1]).parents[1]
    assert list(temp.rglob("gcs_server.out"))
    next(line for line in job.stdout if line.startswith("worker "))
    assert open_to_others(temp) == []
    job.communicate(timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the port range of outgoing connections in /proc")
def test_no_outgoing_connection_can_take_a_free_port() -> None:
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(7)
    assert len(set(ports)) == 7
    assert max(ports) < first_of_connections


def test_submit_streams_the_log_and_exits_with_the_jobs_code(project: Project) -> None:
    printed = project.inv("submit", "probe", "--", "0")
    assert "worker" in printed
    rays = "Running entrypoint for job"
    assert rays not in printed, "only --verbose shows Ray's own messages"
    assert rays in project.inv("logs", "--verbose")
    temp = project.state["temp"]
    assert f"temp {temp} {temp}" in printed, "temporary files of jobs must be deleted with the cluster"
    done = subprocess.run([*project.command, "submit", "probe", "--", "7"], cwd=project.folder, capture_output=True)
    assert done.returncode == 7


def test_a_secret_reaches_driver_and_workers_and_appears_nowhere_else(project: Project) -> None:
    digest = hashlib.sha256(CANARY.encode()).hexdigest()
    log = project.inv("submit", "probe", "--", "0")
    assert f"driver {digest}" in log
    assert f"worker {digest}" in log

    argv = read_all(processes(project), psutil.Process.cmdline)
    environments = read_all(processes(project), psutil.Process.environ)
    assert min(len(argv), len(environments)) > 5
    assert CANARY not in json.dumps([argv, environments, log])
    answers = [project.get(path).text for path in ("/api/jobs/", "/api/v0/actors?detail=1", "/api/v0/workers?detail=1")]
    answers += [
        project.get(path).text for path in ("/api/cluster_status", "/api/v0/tasks?detail=1", "/nodes?view=summary")
    ]
    assert CANARY not in "".join(answers)
    for file in filter(Path.is_file, Path(project.state["temp"]).rglob("*")):
        assert CANARY.encode() not in file.read_bytes(), f"{file} contains the secret"
    unpacked = [path for path in Path(project.state["temp"]).rglob("working_dir_files/*") if path.is_dir()]
    assert unpacked
    assert not [path for folder in unpacked for path in folder.rglob(".env")]


def test_status_shows_nodes_jobs_and_problems(project: Project) -> None:
    project.inv("submit", "probe", "--", "3", ok=False)
    printed = " ".join(project.inv("status").split())  # lines of the table may be wrapped
    for expected in ("127.0.0.1", "head", "CPU", "probe-", "succeeded", "failed", "exit code 3"):
        assert expected in printed


def test_ctrl_c_without_a_terminal_leaves_the_job_running(project: Project) -> None:
    client = subprocess.Popen(
        [*project.command, "submit", "probe", "--", "0", "120", "results/probe"],
        cwd=project.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    job_id = read_until(client, "worker")
    client.send_signal(signal.SIGINT)
    rest, _ = client.communicate(timeout=30)
    assert client.returncode == 130
    assert f"inv stop {job_id}" in rest
    waiting = " ".join(project.inv("status").partition("Waiting")[2].split())
    assert f"{job_id} {getpass.getuser()} 1 × 1000 CPU" in waiting
    again = ("submit", "probe", "--", "0", "0", "results/probe")
    folder = project.folder / "results" / "probe"
    stop = f"error: {job_id} is writing to {folder}; stop it: inv stop {job_id}, or pass another --output."
    assert stop in project.inv(*again, ok=False)
    assert f"{job_id} is stopped" in project.inv("stop", "--job", job_id)
    assert "driver" in project.inv(*again), "the folder of a stopped job must be free at once"
    assert f"{job_id} is stopped" in project.inv("stop", "--job", job_id), "stopping a job twice must not be an error"


def test_ctrl_c_offers_to_stop_the_job(project: Project) -> None:
    terminal, theirs = pty.openpty()
    client = subprocess.Popen(
        [*project.command, "submit", "probe", "--", "0", "120"],
        cwd=project.folder, stdin=theirs, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    job_id = read_until(client, "worker")
    client.send_signal(signal.SIGINT)
    time.sleep(1)
    os.write(terminal, b"stop\n")
    rest, _ = client.communicate(timeout=60)
    assert f"{job_id} is stopped" in rest


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["submit", "prepocess"], "there is no job 'prepocess'"),
        (["up", "--target", "azure"], "unknown target 'azure'"),
        (["logs", "--job", "nothing-1"], "there is no job 'nothing-1'"),
        (["logs", "nothing-1"], "there is no job 'nothing-1'"),
        (["stop", "--target", "local", "nothing-1"], "there is no job 'nothing-1'"),
    ],
)
def test_bad_input_gets_one_sentence(project: Project, words: list[str], sentence: str) -> None:
    printed = project.inv(*words, ok=False).strip()
    assert printed.startswith("error: ")
    assert sentence in printed
    assert "\n" not in printed


def test_a_cluster_that_is_too_busy_to_answer_is_not_ended(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project.folder / ".cluster"
    for name, file in (("FOLDER", ""), ("STATE_FILE", "local.json"), ("TOKEN_FILE", "token")):
        monkeypatch.setattr(state, name, folder / file)
    monkeypatch.setattr(head, "ANSWER_TIMEOUT_S", 1)
    running = processes(project)
    [dashboard] = [one for one in running if "dashboard/dashboard.py" in " ".join(one.cmdline())]
    dashboard.suspend()
    try:
        for verb in (Local().connect, functools.partial(Local().up, yes=True)):
            with pytest.raises(Unreachable, match="is running, but has not answered"):
                verb()
    finally:
        dashboard.resume()
    assert {one.pid for one in running} <= {one.pid for one in cluster_processes.find(project.state)}
    assert "alive" in project.inv("status")


def test_another_process_with_the_pid_of_the_head_is_not_ended() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    cluster = {"id": "none", "temp": "/tmp/ray-none", "session": stranger.pid, "boot": state.boot_id()}
    assert cluster_processes.find(cluster) == []
    assert not cluster_processes.head_is_alive(cluster)
    stranger.communicate(b"\n")


def test_a_folder_too_large_is_not_uploaded(project: Project) -> None:
    large = project.folder / "notes" / "large.bin"
    large.parent.mkdir()
    large.write_bytes(os.urandom(30 * 2**20))
    assert "30 of it in notes" in project.inv("submit", "probe", "--", "0", ok=False)
    shutil.rmtree(large.parent)


def test_down_leaves_nothing_and_can_be_repeated(project: Project, ray_session: None) -> None:
    import ray

    cluster, running = project.state, processes(project)
    assert "local is down" in project.inv("down")
    assert not [process for process in running if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not Path(cluster["temp"]).exists()
    assert "nothing to stop" in project.inv("down")
    assert "inv up" in project.inv("status", ok=False)
    assert ray.get(ray.remote(num_cpus=0.1)(lambda: "another Ray lives on").remote()) == "another Ray lives on"


def test_a_temp_folder_too_long_for_sockets_is_refused(project: Project, tmp_path: Path) -> None:
    variables = os.environ | {"RAY_TMPDIR": str(tmp_path)}
    done = subprocess.run([*project.command, "up"], cwd=project.folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"error: RAY_TMPDIR is {tmp_path}, which is too long for socket paths. Use at most 25 bytes"
    )
    assert not list(tmp_path.iterdir())


def test_a_temp_folder_with_a_space_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "two words"))
    assert "does not support paths with spaces. Run: unset RAY_TMPDIR" in project.inv("up", ok=False)
    assert not (project.folder / ".cluster" / "local.json").exists()


@pytest.mark.nightly
def test_a_killed_cluster_is_cleared_by_the_next_up(project: Project) -> None:
    project.inv("up")
    orphans = processes(project)
    os.kill(project.state["session"], signal.SIGKILL)
    time.sleep(1)
    assert "not up" in project.inv("status", ok=False)
    assert "local is up" in project.inv("up")
    assert not [process for process in orphans if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
