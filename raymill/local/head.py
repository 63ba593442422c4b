"""Start the local Ray head on loopback, and check that it works."""

import os
import subprocess
import sys
import time
from typing import Any

import requests
from ray.job_submission import JobStatus

from raymill import environment
from raymill.console import Console
from raymill.errors import UserError
from raymill.job_client import PROBE_JOB, JobClient, Unreachable
from raymill.local import processes, state
from raymill.serving import haproxy
from raymill.submission import LocalRaySection

START_TIMEOUT_S = 90
ANSWER_TIMEOUT_S = 30


def start(cluster: dict[str, Any], section: LocalRaySection) -> subprocess.Popen:
    """Run `ray start --block` in a new session, so that it outlives this verb. `cluster` is the cluster's state."""
    client, agent, agent_grpc, metrics, runtime_env, proxy = cluster["other_ports"]
    command = [
        *(sys.executable, "-m", "raymill.local.ray_start", cluster["temp"]),
        *("start", "--head", "--block", "--disable-usage-stats"),
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
        f"--port={_port(cluster['address'])}",
        f"--dashboard-port={_port(cluster['dashboard'])}",
        f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}",
        f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--metrics-export-port={metrics}",
        f"--runtime-env-agent-port={runtime_env}",
        *("--min-worker-port=0", "--max-worker-port=0"),  # any free port; Ray's default range may be in use
        f"--num-cpus={section.num_cpus}",
        f"--object-store-memory={section.object_store_mib * 2**20}",
        f"--temp-dir={cluster['temp']}/ray",  # a subfolder, because Ray gives all users access to its temp folder
    ]
    _, sources = environment.package_sources(environment.pip_settings())
    variables = (
        environment.compiled_kernels()
        | os.environ
        | sources
        | {  # `quantize` installs packages with uv
            "UV": environment.find_uv(),
            processes.MARK: cluster["id"],
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # with one node, Ray then binds its ports to loopback
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(state.TOKEN_FILE),
            **haproxy.variables(cluster["temp"], proxy),
            "TMPDIR": cluster["temp"],  # temporary files of jobs are private, and are deleted with the cluster
        }
    )
    variables.pop("RAY_ADDRESS", None)
    with state.LOG_FILE.open("w") as log:
        return subprocess.Popen(
            command, env=variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def is_up() -> bool:
    """Return whether the cluster answers.

    Raises:
        Unreachable: the cluster is running but does not answer. It may just be busy, so do not stop it.
    """
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while state.STATE_FILE.is_file() and state.TOKEN_FILE.is_file():
        if _answers(state.read()["dashboard"], "/api/v0/nodes", '"ALIVE"'):  # a dashboard may outlive its node
            return True
        if not processes.head_is_alive(state.read()):
            return False
        if time.monotonic() > deadline:
            raise Unreachable(
                f"the local cluster is running, but has not answered for {ANSWER_TIMEOUT_S} s. "
                "Try again. If it keeps failing: inv down, then inv up"
            )
        time.sleep(0.5)
    return False


def wait_until_ready(process: subprocess.Popen, dashboard: str) -> None:
    """Wait until the cluster has run an empty job, and check that the head is still alive.

    The job shows that the job server, the agent, the scheduler and a worker all work.

    Raises:
        UserError: the head died, or took too long to start.
    """
    started = time.monotonic()
    with Console().status("starting Ray on loopback") as spinner:
        # the node's agent serves the node's logs and starts jobs; it takes longer to start than the dashboard
        while not _answers(dashboard, "/api/v0/logs?node_ip=127.0.0.1"):
            waited = time.monotonic() - started
            _check_alive(process)
            if waited > START_TIMEOUT_S:
                raise UserError(f"Ray did not answer within {START_TIMEOUT_S} s")
            spinner.update(f"starting Ray on loopback: {waited:.0f} s")
            time.sleep(0.5)
    _run_probe_job(process, dashboard)


def _run_probe_job(process: subprocess.Popen, dashboard: str) -> None:
    client = JobClient(dashboard, state.headers())
    client.submit_job(entrypoint="true", submission_id=PROBE_JOB)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (details := client.get_job_info(PROBE_JOB)).status.is_terminal():
        _check_alive(process)
        if time.monotonic() > deadline:
            raise UserError(f"Ray did not run a job within {START_TIMEOUT_S} s")
        time.sleep(0.1)
    if details.status != JobStatus.SUCCEEDED:
        raise UserError(f"Ray could not run a job: {details.message}")
    _check_alive(process)


def _answers(dashboard: str, path: str, text: str = "") -> bool:
    try:
        response = requests.get(dashboard + path, headers=state.headers(), timeout=5)
    except requests.RequestException:
        return False
    return response.ok and text in response.text


def _check_alive(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        raise UserError("Ray stopped while it was starting")


def _port(address: str) -> str:
    return address.rpartition(":")[2]
