"""Submit a job with Ray's Jobs API, follow its log, and stop it."""

import asyncio
import fnmatch
import os
import shlex
import sys
import time
from pathlib import Path

from ray.job_submission import JobDetails, JobStatus

from raymill import job_output, job_scripts, settings
from raymill.errors import UserError
from raymill.job_client import JobClient, Unreachable, is_submitted, owner, user
from raymill.job_context import JobContext
from raymill.printable import printable
from raymill.target import Connection, NotOnCluster, PastLog

EXCLUDES = [
    "/.env",
    "/.env.lock",
    "/.git",
    "/.venv",
    "/.cluster",
    "/data",
    "/models",
    "/runs",
    "/results",
    "/.*_cache",
    "__pycache__",
]
"""Secrets, large files, and files that can be recreated are never uploaded. The syntax is that of .gitignore."""

NODE_GONE_S = 15  # if a job's node is gone, Ray itself normally ends the job within this time
SECRETS_HOOK = "raymill.ray_support.job_secrets.load"


class SecretsSection(settings.Section):
    """[secrets] of settings.toml."""

    names: list[str]


class UploadSection(settings.Section):
    """[cluster.ray] of settings.toml. [local.ray] has more keys: see `LocalRaySection`."""

    working_dir_mib: int


class LocalRaySection(UploadSection):
    """[local.ray] of settings.toml."""

    num_cpus: int
    object_store_mib: int


def _load_upload(profile: str | None) -> UploadSection:
    if profile == "local":
        return settings.load(LocalRaySection, "ray", profile=profile)
    return settings.load(UploadSection, "ray", profile=profile)


def submit(connection: Connection, job: str, arguments: list[str]) -> str:
    """Submit `jobs/JOB.py` with these arguments. Return Ray's id of the job.

    Raises:
        UserError: there is no such job, a setting is wrong, the project's folder is too large, or Ray does not
            accept the job.
    """
    job_scripts.find(job)
    profile = JobContext.from_variables(connection.job_variables).profile
    check_size(_load_upload(profile).working_dir_mib)
    secret_names = settings.load(SecretsSection, "secrets", profile=profile).names
    runtime_env = {
        "working_dir": str(settings.PROJECT),
        "excludes": EXCLUDES,
        "env_vars": connection.job_variables
        | connection.capacity_variables()
        | JobContext(inv_target=connection.target, secret_names=",".join(secret_names)).variables()
        | {
            "PYTHONUNBUFFERED": "1",
            "RAY_LOGGER_LEVEL": "warning",  # the jobs print what matters
        },
        "worker_process_setup_hook": SECRETS_HOOK,
    }
    try:
        return connection.client().submit_job(
            entrypoint=shlex.join(["python", "-m", f"jobs.{job}", *arguments]),
            submission_id=f"{job}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}",
            runtime_env=runtime_env,
            metadata={"job": job, "owner": user()},
        )
    except RuntimeError as error:  # Ray's client raises nothing more specific
        raise UserError(f"Ray did not accept the job ({error}). Run: inv status{connection.target_option}") from None


def follow(connection: Connection, job_id: str, *, verbose: bool = False) -> int:
    """Print the job's log as it grows, and return the job's exit code. `verbose` includes Ray's own messages.

    On Ctrl-C, ask whether to stop the job. Without a terminal, leave it running.
    """
    try:
        with job_output.Printer(verbose) as printer:
            asyncio.run(_print_log(connection, job_id, printer))
        details = _wait_until_ended(connection, job_id)
    except KeyboardInterrupt:
        return _interrupted(connection, job_id)
    except Unreachable:
        raise Unreachable(_cluster_lost(connection, job_id)) from None
    return _exit_code(details)


def print_past(log: PastLog, *, verbose: bool = False) -> int:
    """Print a log from the bucket, and return the job's exit code. `verbose` includes Ray's own messages."""
    job = log.job
    if log.copy is None:
        print(printable(f"{job.id} did not start: {job.message}"), file=sys.stderr)
        return job.exit_code
    saved = f"{log.copy.saved.astimezone():%Y-%m-%d %H:%M:%S}"
    print(
        f"{printable(job.id)}: {job.state}. This is the copy of its log in the bucket, saved at {saved}:",
        file=sys.stderr,
    )
    with job_output.Printer(verbose) as printer:
        printer.write(log.copy.text)
    return job.exit_code


def stop(connection: Connection, job_id: str) -> JobDetails:
    """Stop a job and return its details. A job that has already ended keeps its status."""
    connection.client().stop_job(job_id)
    try:
        return _wait_until_ended(connection, job_id)
    except Unreachable:
        raise Unreachable(_cluster_lost(connection, job_id)) from None


def find(connection: Connection, job_id: str) -> str:
    """Return `job_id`, or the id of this user's latest job if it is empty.

    Raises:
        NotOnCluster: there is no such job.
    """
    jobs = [job for job in connection.client().list_jobs() if is_submitted(job.submission_id)]
    if not jobs:
        raise NotOnCluster(
            f"no job has been submitted to this cluster yet. Run: inv submit{connection.target_option} JOB"
        )
    if not job_id:
        own = [job for job in jobs if owner(job.metadata) in ("", user())]
        if not own:
            raise NotOnCluster(
                f"no job of {user()} is on this cluster. To see the jobs of others, run: "
                f"inv status{connection.target_option}"
            )
        return max(own, key=lambda job: job.start_time or 0).submission_id
    if job_id not in [job.submission_id for job in jobs]:
        raise NotOnCluster(f"there is no job {job_id!r} on this cluster. Run: inv status{connection.target_option}")
    return job_id


async def _print_log(connection: Connection, job_id: str, printer: job_output.Printer) -> None:
    """Print the log as it grows, and return when the job has ended.

    Ray's stream lags three seconds behind, so the rest is fetched when the job ends.
    """
    client = connection.client()
    printed = 0

    async def stream() -> None:
        nonlocal printed
        async for lines in client.tail_job_logs(job_id):
            printer.write(lines)
            printed += len(lines)

    async def end() -> None:
        while not await asyncio.to_thread(_has_ended, client, job_id):
            await asyncio.sleep(0.5)

    streaming, ending = asyncio.create_task(stream()), asyncio.create_task(end())
    done, others = await asyncio.wait((streaming, ending), return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(
        streaming, ending, return_exceptions=True
    )  # otherwise asyncio logs the exception of the other task
    for task in done:
        task.result()  # raises the task's exception, if any
    if ending in done:
        printer.write(client.get_job_logs(job_id)[printed:])


def _has_ended(client: JobClient, job_id: str) -> bool:
    """Return whether a job has ended. Raises `Unreachable` if its node is gone and Ray does not end the job in time."""
    deadline = time.monotonic() + NODE_GONE_S
    while True:
        details = client.get_job_info(job_id)
        if details.status.is_terminal():
            return True
        if not details.driver_node_id or client.node_is_alive(details.driver_node_id):
            return False
        if time.monotonic() > deadline:
            raise Unreachable(
                f"the node that ran {job_id} is gone. Run: {settings.inv('down')}, then {settings.inv('up')}"
            )
        time.sleep(0.5)


def _cluster_lost(connection: Connection, job_id: str) -> str:
    target = connection.target_option
    again = f"inv down{target}, then inv up{target}, and submit the job again with the same options"
    if connection.forwarded_ports:  # perhaps only the tunnel broke
        again = f"inv logs{target} {job_id}; if that fails too: {again}"
    return (
        f"the cluster no longer answers, and {job_id} may be lost with it. Saved checkpoints and results remain, and a "
        f"run resumes from its last checkpoint. Until inv down{target}, the log is job-driver-{job_id}.log in "
        f"{connection.log_folder}. Run: {again}"
    )


def _interrupted(connection: Connection, job_id: str) -> int:
    answer, target = "", connection.target_option
    if sys.stdin.isatty():
        answer = input("\nstop the job, or leave it running? [stop/LEAVE] ")
    if answer.strip().lower() in ("s", "stop"):
        print(f"{job_id} is {stop(connection, job_id).status.value.lower()}")
    else:
        print(f"\n{job_id} keeps running. Follow it: inv logs{target} {job_id}   Stop it: inv stop{target} {job_id}")
    return 130  # the exit code of shells for Ctrl-C


def _wait_until_ended(connection: Connection, job_id: str, timeout_s: float = 60) -> JobDetails:
    """Wait until a job has ended, and return its details. The log may end a moment before the status changes."""
    client, deadline = connection.client(), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if _has_ended(client, job_id):
            return client.get_job_info(job_id)
        time.sleep(0.2)
    raise UserError(f"{job_id} has not ended after {timeout_s:.0f} s. Run: inv status{connection.target_option}")


def _exit_code(details: JobDetails) -> int:
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.driver_exit_code is None:  # the job never ran, so its log gives no reason
        print(printable(f"the job did not start: {details.message}", "\n"), file=sys.stderr)
    return details.driver_exit_code or 1


def check_size(max_mib: int) -> None:
    """Raise `UserError` if an upload of the project's folder would be larger than `max_mib`."""
    sizes: dict[str, int] = {}
    for folder, subfolders, files in os.walk(settings.PROJECT):
        path = Path(folder).relative_to(settings.PROJECT)
        subfolders[:] = [name for name in subfolders if not _excluded(path / name)]
        for name in files:
            if not _excluded(path / name):
                file = Path(folder) / name
                top = (path / name).parts[0]
                sizes[top] = sizes.get(top, 0) + file.lstat().st_size
    total = sum(sizes.values()) / 2**20
    if total > max_mib:
        largest = max(sizes, key=lambda top: sizes[top])
        raise UserError(
            f"the project is too large to upload: {total:.0f} MiB, {sizes[largest] / 2**20:.0f} of it in {largest}, "
            f"and the limit is {max_mib}. Move {largest} into data/, or raise working_dir_mib in settings.toml"
        )


def _excluded(path: Path) -> bool:
    """Return whether a file or folder is not uploaded. `path` is relative to the project."""
    return any(fnmatch.fnmatch(f"/{path}" if pattern[0] == "/" else path.name, pattern) for pattern in EXCLUDES)
