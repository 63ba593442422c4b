"""The `local` target: a Ray head on this machine's loopback, closed by a token, beside any other Ray here."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import requests
from ray.job_submission import JobStatus
from rich.console import Console

import settings
from cluster import doctor, head_logs
from cluster.job_client import PROBE_JOB, JobClient, Unreachable
from cluster.network import free_ports
from cluster.target import Bill, Connection, Finding
from pipeline.serving import haproxy

STATE = settings.PROJECT / ".cluster"
FILE = STATE / "local.json"
TOKEN = STATE / "token"
LOG = STATE / "ray.log"
MARK = "RAY_PROJECT_CLUSTER"  # in the environment of every process that the cluster starts
START_TIMEOUT_S = 90
ANSWER_TIMEOUT_S = 30
MOST_TEMP_BYTES = 38  # a socket path of HAProxy may have 97 bytes, and adds 59 to this folder; Ray's are shorter


class RaySection(settings.Section):
    """[local.ray] of settings.toml."""

    num_cpus: int
    object_store_mib: int
    working_dir_mib: int


class Local:
    """One Ray node on loopback."""

    name = "local"
    profile = "local"

    def doctor(self) -> list[Finding]:
        return doctor.local()

    def prepare(self) -> None:
        print("local needs no preparation")

    def up(self, yes: bool) -> None:
        if _is_up():
            print(f"local is up already: {_state()['dashboard']}")
            return
        _clear()  # what a crash left behind
        section = settings.load(RaySection, "ray", profile=self.profile)
        _make_env_file()
        started = time.monotonic()
        state = _new_state()
        process = _start_head(state, section)
        FILE.write_text(json.dumps(state | {"session": process.pid}))
        try:
            _wait_until_ready(process, state["dashboard"])
            _prove(process, state["dashboard"])
        except settings.UserError as refusal:
            raise settings.UserError(_given_up(refusal, state)) from None
        print(
            f"local is up after {time.monotonic() - started:.0f} s: {section.num_cpus} logical CPUs, "
            f"{section.object_store_mib} MiB of object store, dashboard {state['dashboard']}"
        )

    def connect(self) -> Connection:
        if not _is_up():
            raise settings.UserError("the local cluster is not up; start it with: inv up")
        return Connection(
            dashboard=_state()["dashboard"],
            headers=_headers(),
            logs=f"{_state()['temp']}/ray/session_latest/logs",
            job_variables={
                **self.files(),
                "RAY_ADDRESS": _state()["address"],  # without it, parts of Ray Train look for any Ray on this machine
                "SECRETS_FILE": str(settings.PROJECT / ".env"),
                "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # nobody takes this machine away
            },
        )

    def files(self) -> dict[str, str]:
        return {"PROFILE": self.profile, "PROJECT_DIR": str(settings.PROJECT)}

    def shell(self, command: str) -> int:
        raise settings.UserError("local is this machine: there is nowhere to go by ssh")

    def dollars_per_machine_hour(self) -> dict[int, float]:
        return {}

    def bill(self) -> Bill:
        return Bill()

    def down(self) -> list[str]:
        if not FILE.is_file():
            print("local is not up: there is nothing to end")
            return []
        left = _clear()
        if not left:
            print("local is down: none of its processes runs, its temp folder is gone, its token is void")
        return left


def _state() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def _headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN.read_text()}"}


def _clear() -> list[str]:
    """End what the state file names and forget it; returns what is left."""
    if not FILE.is_file():
        return []
    state = _state()
    _end_processes(state)
    shutil.rmtree(state["temp"], ignore_errors=True)
    left = [f"process {process.pid}" for process in _processes(state)]
    left += [f"folder {state['temp']}"] if Path(state["temp"]).exists() else []
    if not left:
        FILE.unlink()
        TOKEN.unlink(missing_ok=True)
    return left


def _is_up() -> bool:
    """Return whether the cluster answers.

    Raises:
        Unreachable: it runs, and does not answer. It may be busy: it must not be cleared.
    """
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while FILE.is_file() and TOKEN.is_file():
        if _answers(_state()["dashboard"], "/api/v0/nodes", '"ALIVE"'):  # a dashboard may outlive its node
            return True
        if not _head_lives(_state()):
            return False
        if time.monotonic() > deadline:
            raise Unreachable(
                f"the local cluster is running, but has not answered for {ANSWER_TIMEOUT_S} s. "
                "Try again. If it keeps failing: inv down, then inv up"
            )
        time.sleep(0.5)
    return False


def _head_lives(state: dict[str, Any]) -> bool:
    """Return whether the process that `up` started is alive. After a reboot, another one may have its number."""
    try:
        return any(state["temp"] in word for word in psutil.Process(state["session"]).cmdline())
    except (KeyError, psutil.Error):  # a zombie has no command line
        return False


def _answers(dashboard: str, path: str, words: str = "") -> bool:
    try:
        response = requests.get(dashboard + path, headers=_headers(), timeout=5)
    except requests.RequestException:
        return False
    return response.ok and words in response.text


def _make_env_file() -> None:
    """A private .env with a fresh API key, so that nothing is ever served without one."""
    file = settings.PROJECT / ".env"
    if file.exists():
        return
    text = (settings.PROJECT / ".env.example").read_text()
    file.touch(mode=0o600)
    file.write_text(text.replace("SERVE_API_KEY=", f"SERVE_API_KEY={secrets.token_urlsafe(32)}"))
    print("made .env with a fresh SERVE_API_KEY; secrets go there, and nowhere else")


def _new_state() -> dict[str, Any]:
    """Written before anything is started, so that `down` finds what a killed `up` left."""
    temp_root = _temp_root()
    STATE.mkdir(exist_ok=True)
    TOKEN.touch(mode=0o600)
    TOKEN.write_text(secrets.token_hex(32))
    dashboard_port, gcs_port, *other_ports = free_ports(8)
    state = {
        "id": secrets.token_hex(8),
        "temp": _make_temp_folder(temp_root),
        "dashboard": f"http://127.0.0.1:{dashboard_port}",
        "address": f"127.0.0.1:{gcs_port}",
        "other_ports": other_ports,
        "boot": _boot(),
    }
    FILE.write_text(json.dumps(state))
    return state


def _temp_root() -> str:
    """Return RAY_TMPDIR or /tmp, as Ray does. TMPDIR, as on macOS, may be too long for socket paths."""
    root = os.environ.get("RAY_TMPDIR", "/tmp")
    if any(character.isspace() for character in root):
        problem = f"RAY_TMPDIR is {root!r}, but HAProxy does not support paths with spaces"
        raise settings.UserError(f"{problem}. Run: unset RAY_TMPDIR")
    return root


def _make_temp_folder(root: str) -> str:
    """Create a temp folder that other users cannot access, and return its path."""
    folder = tempfile.mkdtemp(prefix="ray-", dir=root)
    if len(os.fsencode(folder)) > MOST_TEMP_BYTES:
        os.rmdir(folder)
        most = MOST_TEMP_BYTES - len(os.fsencode(folder)) + len(os.fsencode(root))
        problem = f"RAY_TMPDIR is {root}, too long for socket paths: use at most {most} bytes"
        raise settings.UserError(f"{problem}, or run: unset RAY_TMPDIR")
    return folder


def _start_head(state: dict[str, Any], section: RaySection) -> subprocess.Popen:
    """`ray start --block` in a session of its own: it lives on after this verb, until `down`."""
    client, agent, agent_grpc, metrics, runtime_env, proxy = state["other_ports"]
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
        f"--port={_port(state['address'])}",
        f"--dashboard-port={_port(state['dashboard'])}",
        f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}",
        f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--metrics-export-port={metrics}",
        f"--runtime-env-agent-port={runtime_env}",
        *("--min-worker-port=0", "--max-worker-port=0"),  # any free port: the default range is shared by all Rays
        f"--num-cpus={section.num_cpus}",
        f"--object-store-memory={section.object_store_mib * 2**20}",
        f"--temp-dir={state['temp']}/ray",  # a subfolder, because Ray gives all users access to its temp folder
    ]
    environment = os.environ | {
        MARK: state["id"],
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # one node, so Ray binds every port of its own to loopback
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(TOKEN),
        **haproxy.environment(state["temp"], proxy),
        "TMPDIR": state["temp"],  # what jobs leave there goes with the cluster, and no other user reads it
    }
    environment.pop("RAY_ADDRESS", None)
    with LOG.open("w") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _wait_until_ready(process: subprocess.Popen, dashboard: str) -> None:
    started = time.monotonic()
    with Console().status("starting Ray on loopback") as spinner:
        # the node's agent, which answers for its logs, starts jobs too, and is there some time after the dashboard
        while not _answers(dashboard, "/api/v0/logs?node_ip=127.0.0.1"):
            waited = time.monotonic() - started
            _must_live(process)
            if waited > START_TIMEOUT_S:
                raise settings.UserError(f"Ray did not answer within {START_TIMEOUT_S} s")
            spinner.update(f"starting Ray on loopback: {waited:.0f} s")
            time.sleep(0.5)


def _prove(process: subprocess.Popen, dashboard: str) -> None:
    """Run an empty job, to check that job server, agent, scheduler and worker work, and that the head stays up."""
    client = JobClient(dashboard, _headers())
    client.submit_job(entrypoint="true", submission_id=PROBE_JOB)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (details := client.get_job_info(PROBE_JOB)).status.is_terminal():
        _must_live(process)
        if time.monotonic() > deadline:
            raise settings.UserError(f"Ray did not run a job within {START_TIMEOUT_S} s")
        time.sleep(0.1)
    if details.status != JobStatus.SUCCEEDED:
        raise settings.UserError(f"Ray could not run a job: {details.message}")
    _must_live(process)


def _given_up(refusal: settings.UserError, state: dict[str, Any]) -> str:
    """Clean up after a failed start, and return the error message."""
    what = "Ray stopped while it was starting" if isinstance(refusal, Unreachable) else str(refusal)
    reason = head_logs.reason(LOG, Path(state["temp"], "ray", "session_latest", "logs"))
    left = _clear()
    rest = f"Left behind: {', '.join(left)}. Run: inv down" if left else "Everything was cleaned up. Try again: inv up"
    return f"{what}: {reason}. Ray's output is in {LOG}. {rest}"


def _must_live(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        raise settings.UserError("Ray stopped while it was starting")


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _processes(state: dict[str, Any]) -> list[psutil.Process]:
    """Return every living process of this cluster, and no other.

    Ray's own are in the session that `up` opened (some overwrite their environment with a title). A job's driver opens
    its own session but carries the mark. The rest are children of these.
    """
    found: dict[int, psutil.Process] = {}
    session = state.get("session") if _owns_session(state) else None
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session or process.environ().get(MARK) == state["id"]:
                found |= {member.pid: member for member in [process, *process.children(recursive=True)]}
        except (psutil.Error, OSError):
            continue  # it ended meanwhile, or it is somebody else's
    return [process for process in found.values() if _is_alive(process) and process.pid != os.getpid()]


def _owns_session(state: dict[str, Any]) -> bool:
    """Return whether the session's number is still the cluster's. After a reboot, the user's shell may have it."""
    try:
        if _is_alive(psutil.Process(state["session"])):
            return _head_lives(state)
    except (KeyError, psutil.NoSuchProcess):
        pass
    return state.get("boot") == _boot()  # no other process gets the number while the session has members


def _boot() -> str:
    """Return what changes with each boot of this machine; the time of the boot may be corrected later."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text() if file.exists() else str(psutil.boot_time())


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end_processes(state: dict[str, Any], patience_s: float = 5) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        processes = _processes(state)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)
        psutil.wait_procs(processes, timeout=patience_s)
