"""Restart the project's processes on this node, and from the head on all workers. Ray and jobs are not affected.

python -m raymill.node.restart ROLE

`inv up` runs it on the head after it has copied new code there. The commands are those of cluster.yaml that start a
module of raymill.node. Each new process ends its predecessor (see process.py).
"""

import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from raymill.common import aws_session, cluster_file, instances
from raymill.common.instances import Instance
from raymill.node import process, state

WATCHDOG = "watchdog"
QUIET: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
TIMEOUT_S = 40.0
"""How long a new watchdog may take to start and to renew the lease, which shows that it works."""
WORKER_TIMEOUT_S = 180.0
SSH = ["ssh", "-i", "~/ray_bootstrap_key.pem", "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=no"]
SSH += ["-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR"]
"""How Ray's autoscaler on the head connects to workers."""
SHELL = ["bash", "--login", "-i", "-c"]
"""How Ray runs commands on nodes. It reads ~/.bashrc first, which ends at once in shells that are not interactive."""


def main(role: str) -> None:
    """Restart the processes of this node and, on the head, those of all workers. Exit with 1 if one does not run."""
    file = cluster_file.load()
    if problem := _restart_here(file.content[f"{role}_start_ray_commands"]):
        sys.exit(problem)  # and the workers keep the earlier code, which works
    if role == "head":
        aws_session.start(file.region)
        head, *workers = [one for one in instances.living(file) if one.state == "running"]
        with ThreadPoolExecutor(16) as pool:
            found = pool.map(lambda worker: _restart_worker(worker, head, file.auth["ssh_user"]), workers)
        if problems := [problem for problem in found if problem]:
            sys.exit("; ".join(problems))
        print(f"the new code runs on the head and {len(workers)} worker{'' if len(workers) == 1 else 's'}")


def _restart_here(commands: list[str]) -> str:
    """Run the commands that start a module of raymill.node. Return what is wrong with the new watchdog, or ""."""
    earlier, deadline = process.running(WATCHDOG), time.monotonic() + TIMEOUT_S
    for command in commands:
        if "-m raymill.node." in command:
            # with no pipe to this process's own output, at whose end ssh would wait for the end of the new process
            subprocess.run([*SHELL, f"source ~/.bashrc; {command}"], **QUIET)
    while not _works(earlier):
        if time.monotonic() > deadline:
            lines = state.LOG_FILE.read_text(errors="replace").splitlines()[-1:] or ["its log is empty"]
            return f"the watchdog of {os.uname().nodename} does not work with the new code ({lines[0]})"
        time.sleep(1)
    return ""


def _works(earlier: psutil.Process | None) -> bool:
    """Return whether another watchdog than the earlier one runs, and has renewed the lease since it took over.

    A new watchdog that fails before it takes over, for example at an import, leaves the earlier one running, and that
    one still renews the lease.
    """
    now = process.running(WATCHDOG)
    if now is None or now == earlier:
        return False
    return state.LEASE.stat().st_mtime > process.pid_file(WATCHDOG).stat().st_mtime


def _restart_worker(worker: Instance, head: Instance, user: str) -> str:
    """Copy this node's code to a worker and restart its processes. Return what went wrong, or ""."""
    address = f"{user}@{worker.private_address}"
    project = f"{Path('~/project').expanduser()}/"
    command = "cd ~/project && python -m raymill.node.restart worker"
    command = f"source ~/.bashrc; export RAY_HEAD_IP={head.private_address}; {command}"
    steps = (
        ["rsync", "--archive", "--exclude", "__pycache__", "-e", shlex.join(SSH), project, f"{address}:project/"],
        [*SSH, address, shlex.join([*SHELL, command])],
    )
    for step in steps:
        try:
            done = subprocess.run(
                step, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=WORKER_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return f"{worker.id} keeps its old code (no answer within {WORKER_TIMEOUT_S:.0f} s)"
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            return f"{worker.id} keeps its old code ({reason[0]})"
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
