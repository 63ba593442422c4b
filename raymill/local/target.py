"""The `local` target: a Ray head that listens on loopback and requires a token.

Other Ray clusters can run on the same machine.
"""

import datetime
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from raymill import env_file, settings
from raymill.doctor import Finding
from raymill.env_file import EnvFile
from raymill.errors import UserError
from raymill.job_client import Unreachable
from raymill.job_context import JobContext
from raymill.local import crash_reason, doctor, head, processes, state
from raymill.submission import LocalRaySection
from raymill.target import CloudStatus, Connection, KeyStore, PastLog, Target

SLOW_START = "timed out during startup"
"""Part of Ray's error if its agents took more than 15 s to start, which is a fixed limit (Ray 2.60)."""


NO_INSTANCES = "local rents no instances. Run: inv capacity --target aws"
NO_LIMITS = "local costs nothing, so it has no limits. Run: inv limits --target aws"
NO_HEAD = "local runs on this machine, so there is no head to connect to. Use your own shell"
REFUSED = {
    "show_capacity": NO_INSTANCES,
    "buy_capacity": NO_INSTANCES,
    "show_limits": NO_LIMITS,
    "change_limits": NO_LIMITS,
    "bake": "local has no nodes that install packages. Run: inv bake --target aws",
    "shell": NO_HEAD,
    "configure_ssh": NO_HEAD,
    "notebook": "local runs on this machine, so no tunnel is needed. Run, after `source .venv/bin/activate`: uv run "
    "--no-project --with jupyterlab jupyter lab",
    "past_jobs": "local keeps no jobs after inv down. To see those of this cluster, run: inv status",
}
"""Methods that make no sense on this machine, and what to do instead."""


class Local(Target):
    """One Ray node on loopback."""

    name = "local"
    profile = "local"

    def by_default(self, method: str) -> NoReturn:
        raise UserError(REFUSED[method])

    def doctor(self) -> list[Finding]:
        return doctor.check()

    def prepare(self, owner: str = "") -> None:
        print("local needs no preparation")

    def up(self, yes: bool, wait: bool = False, owner: str = "") -> None:
        if head.is_up():
            print(f"local is already up: {state.read()['dashboard']}")
            return
        _clear()  # remove what a crash has left behind
        section = settings.load(LocalRaySection, "ray", profile=self.profile)
        env_file.create()
        started = time.monotonic()
        try:
            cluster = _start(section)
        except UserError as error:
            if SLOW_START not in str(error):
                raise
            print("this machine is busy, so a part of Ray did not start in time; trying again", flush=True)
            cluster = _start(section)
        print(
            f"local is up after {time.monotonic() - started:.0f} s: {section.num_cpus} logical CPUs, "
            f"{section.object_store_mib} MiB of object store, dashboard {cluster['dashboard']}"
        )

    def connect(self) -> Connection:
        if not head.is_up():
            raise UserError("the local cluster is not up. Run: inv up")
        cluster = state.read()
        return Connection(
            dashboard=cluster["dashboard"],
            headers=state.headers(),
            log_folder=f"{cluster['temp']}/ray/session_latest/logs",
            job_variables={
                **self.storage_variables(),
                **JobContext(
                    secrets_file=str(settings.PROJECT / ".env"), access_logs=str(state.ACCESS_LOGS)
                ).variables(),
                "RAY_ADDRESS": cluster["address"],  # otherwise parts of Ray Train connect to any Ray on this machine
                "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # this machine is never preempted
            },
        )

    def storage_variables(self) -> dict[str, str]:
        return JobContext(profile=self.profile, project_dir=str(settings.PROJECT)).variables()

    def dollars_per_instance_hour(self, types: Collection[str] = ()) -> dict[str, float]:
        return {}

    def cloud_status(self) -> CloudStatus:
        return CloudStatus()

    def past_log(self, job_id: str) -> PastLog | None:
        return None

    def access_logs(self, since: datetime.datetime) -> Iterable[str]:
        for file in sorted(state.ACCESS_LOGS.glob("*.log")):
            if file.stat().st_mtime >= since.timestamp():
                yield file.read_text(encoding="utf-8")

    def key_stores(self) -> Sequence[KeyStore]:
        return [EnvFile()]

    def down(self, owner: str = "", drain_s: int = 0) -> list[str]:
        if not state.STATE_FILE.is_file():
            print("the local cluster is not up, so there is nothing to stop")
            return []
        if drain_s:
            from raymill import drain  # imports Ray

            drain.before_down(self, drain_s)
        left = _clear()
        if not left:
            print("local is down: its processes have ended, and its temp folder and token are deleted")
        return left


def _clear() -> list[str]:
    """Stop the cluster that the state file describes, and delete its files. Return what is left."""
    if not state.STATE_FILE.is_file():
        return []
    cluster = state.read()
    processes.end(cluster)
    shutil.rmtree(cluster["temp"], ignore_errors=True)
    left = [f"process {process.pid}" for process in processes.find(cluster)]
    left += [f"folder {cluster['temp']}"] if Path(cluster["temp"]).exists() else []
    if not left:
        state.STATE_FILE.unlink()
        state.TOKEN_FILE.unlink(missing_ok=True)
    return left


def _start(section: LocalRaySection) -> dict[str, Any]:
    """Start the cluster, and return its state. Raises `UserError` if it does not start."""
    cluster = state.create()
    process = head.start(cluster, section)
    cluster["session"] = process.pid
    state.write(cluster)
    try:
        head.wait_until_ready(process, cluster["dashboard"])
    except UserError as error:
        raise UserError(_clean_up_failed_start(error)) from None
    return cluster


def _clean_up_failed_start(error: UserError) -> str:
    """Clean up after a failed start, and return the error message."""
    what = "Ray stopped while it was starting" if isinstance(error, Unreachable) else str(error)
    reason = crash_reason.find(state.LOG_FILE, Path(state.read()["temp"], "ray", "session_latest", "logs"))
    left = _clear()
    rest = f"Left behind: {', '.join(left)}. Run: inv down" if left else "Everything was cleaned up. Try again: inv up"
    return f"{what}: {reason}. Ray's output is in {state.LOG_FILE}. {rest}"
