"""Code that the fault tests share: it starts a cluster, submits jobs, injects faults, and runs the project's verbs."""

import contextlib
import functools
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from raymill import settings, submission
from raymill.aws import head, ssh
from raymill.aws.ssh import SshHead
from raymill.aws.target import Aws
from raymill.common import cluster_file, instances
from raymill.common.cluster_file import ClusterFile
from raymill.emulator import scenario
from raymill.emulator.waiting import slowdown, wait_for
from raymill.errors import UserError
from raymill.target import Connection

VERB_TIMEOUT_S = 600


class Harness:
    """The cluster that a fault test works on."""

    def __init__(self) -> None:
        self.file: ClusterFile = cluster_file.load()
        self.connection: Connection

    def ensure_up(self) -> None:
        """Start the cluster, or repair it if an earlier test changed it, and connect to it."""
        target = Aws()
        output, started = io.StringIO(), time.monotonic()
        try:
            with contextlib.redirect_stdout(output):  # hides fifty lines that are the same in each test
                target.up(yes=True)
        except UserError:
            print(output.getvalue())
            raise
        print(f"up after {time.monotonic() - started:.0f} s", flush=True)
        scenario.set_idle_timeout(self.file, scenario.SHORT_IDLE_MINUTES)
        self.connection = target.connect()

    def head(self) -> SshHead:
        return ssh.find_head(self.file)

    def report(self) -> dict[str, Any]:
        """Return what raymill/node/head_status.py prints on the head."""
        return head.read_status(self.head())

    def workers(self) -> list[instances.Instance]:
        return [machine for machine in instances.living(self.file) if machine.node_type != self.file.head.name]

    def wait_until_no_workers(self) -> None:
        wait_for(lambda: not self.workers(), 120, "the workers of the previous test to end")

    # ------------------------------------------------------------ jobs

    def submit(self, code: str, *arguments: str, with_secrets: bool = False) -> str:
        """Submit Python code as a job that runs in a copy of the project's folder, and return the job's id."""
        environment: dict[str, Any] = {"working_dir": str(settings.PROJECT), "excludes": submission.EXCLUDES}
        environment["env_vars"] = self.connection.job_variables | self.connection.capacity_variables()
        if with_secrets:
            environment["env_vars"]["SECRET_NAMES"] = "HF_TOKEN"
            environment["worker_process_setup_hook"] = submission.SECRETS_HOOK
        words = " ".join(arguments)
        return self.connection.client().submit_job(entrypoint=f'python -c "{code}" {words}', runtime_env=environment)

    @functools.cached_property
    def baseline_loss(self) -> float:
        """The final loss of a training run without faults."""
        return final_loss(self.wait_for_success(self.train("baseline"), 300))

    def train(self, name: str, *options: str) -> str:
        """Submit a one-minute training run on two GPU machines, and return the job's id.

        Unless `options` say otherwise, the run has 30 steps and a checkpoint every 5 steps.
        """
        words = [word for word in scenario.TRAINING if word != "--fresh"]
        words += ["--steps", "30", "--log-every", "5", "--checkpoint-every", "5", "--global-batch-rows", "48"]
        return submission.submit(self.connection, "finetune_ddp", [*words, "--name", name, *options])

    def stop_jobs(self) -> None:
        """Stop all jobs, because the previous test may have left jobs running."""
        client = self.connection.client()
        for job in client.list_jobs():
            if job.submission_id and not job.status.is_terminal():
                client.stop_job(job.submission_id)

    def log(self, job: str) -> str:
        """Return a job's log without the line in which Ray quotes the job's code.

        That line contains the words that tests wait for.
        """
        lines = self.connection.client().get_job_logs(job).splitlines()
        return "\n".join(line for line in lines if not line.startswith("Running entrypoint"))

    def is_running(self, job: str) -> bool:
        return self.connection.client().get_job_status(job) == "RUNNING"

    def wait_for_step(self, job: str, step: int) -> None:
        """Wait until a training run has printed this step or a later one. A run does not print every step."""

        client = self.connection.client()

        def reached() -> bool:
            log = self.log(job)
            assert not client.get_job_status(job).is_terminal(), f"{job} has ended: {log[-2000:]}"
            return any(int(printed) >= step for printed in re.findall(r"step +(\d+)/", log))

        wait_for(reached, 300, f"the training to reach step {step}")

    def wait_for_success(self, job: str, timeout_s: float = 240) -> str:
        """Wait until a job has succeeded, and return its log."""
        client = self.connection.client()
        try:
            wait_for(lambda: client.get_job_status(job).is_terminal(), timeout_s, f"{job} to end")
        except UserError as error:
            raise UserError(f"{error}. The end of its log: {self.log(job)[-2000:]}") from None
        assert client.get_job_status(job) == "SUCCEEDED", self.log(job)[-2000:]
        return self.log(job)


def final_loss(log: str) -> float:
    """Return the loss at the last step from the log of a `Harness.train` run."""
    found = re.findall(r"step 30/30  loss ([\d.]+)", log)
    assert found, log
    return float(found[-1])


# ---------------------------------------------------------------- faults


def control(**command: Any) -> None:
    """Send a command to the cloud's control API (see raymill.emulator.cloud.ControlApi)."""
    request = urllib.request.Request(scenario.CONTROL_URL, data=json.dumps(command).encode(), method="PUT")
    urllib.request.urlopen(request).close()


@contextlib.contextmanager
def no_capacity(*launches: dict[str, Any]) -> Iterator[None]:
    """Make the emulated AWS refuse these launches for lack of capacity (see raymill.emulator.api.InjectedFaults)."""
    control(faults={"no_capacity": launches})
    try:
        yield
    finally:
        control(faults={"no_capacity": []})


@contextlib.contextmanager
def no_quota(code: str) -> Iterator[None]:
    """Set a quota of the emulated account to 0 vCPUs."""
    control(faults={"quotas": {code: 0}})
    try:
        yield
    finally:
        control(faults={"quotas": {}})


@contextlib.contextmanager
def replaced_file(path: Path, text: str) -> Iterator[None]:
    """Inside the cloud, replace a file's text by means of a bind mount. The file itself does not change.

    If the file does not exist, an empty file is created, and removed together with the mount.
    """
    replacement = Path("/tmp/replaced", path.name)
    replacement.parent.mkdir(exist_ok=True)
    replacement.write_text(text)
    is_new = not path.exists()
    path.touch(mode=0o600)
    subprocess.run(["mount", "--bind", replacement, path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)
        if is_new:
            path.unlink()


def changed_cluster_file(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Change top-level values of cluster.yaml inside the cloud."""
    content = yaml.safe_load(cluster_file.FILE.read_text()) | changes
    return replaced_file(cluster_file.FILE, yaml.safe_dump(content, sort_keys=False))


# ---------------------------------------------------------------- the project's verbs


def run_verb(
    *words: str, exit_code: int | tuple[int, ...] = 0, folder: Path = settings.PROJECT, **variables: str
) -> str:
    """Run a verb as a user would, check its exit code, and return its output."""
    return _run(_command(*words), exit_code, folder, variables)


def run_printed(command: str) -> str:
    """Run `inv COMMAND` exactly as a message prints it, check that it succeeds, and return its output."""
    return _run([sys.executable, "-m", "invoke", *shlex.split(command)], 0, settings.PROJECT, {})


def _run(command: list[str], exit_code: int | tuple[int, ...], folder: Path, variables: Mapping[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**_environment(), "COLUMNS": "2000", **variables},  # wide, so that no message is wrapped
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=VERB_TIMEOUT_S * slowdown(),
    )
    expected = (exit_code,) if isinstance(exit_code, int) else exit_code
    assert done.returncode in expected, f"{shlex.join(command)} exited with {done.returncode}: {done.stdout[-1000:]}"
    return done.stdout


def start_verb(*words: str) -> subprocess.Popen[str]:
    """Start a verb as a user would, and return its process, which writes its output to a pipe."""
    return subprocess.Popen(
        _command(*words),
        cwd=settings.PROJECT,
        env=_environment() | {"PYTHONUNBUFFERED": "1", "COLUMNS": "2000"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def interrupt_verb(marker: str, *words: str) -> str:
    """Run a verb, press Ctrl-C when it prints `marker`, and return its last line of output."""
    process = start_verb(*words)
    assert process.stdout
    for line in process.stdout:
        if marker in line:
            os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C in a terminal, signals the whole process group
            break
    rest = process.stdout.read()
    assert process.wait(60 * slowdown()) == 130, rest
    return rest.strip().splitlines()[-1]


def _command(verb: str, *words: str) -> list[str]:
    # --target comes first, because words after `--` are options of a job
    return [sys.executable, "-m", "invoke", verb, "--target", "rehearsal", *words]


def _environment() -> dict[str, str]:
    """Return the environment as a user has it: without PYTHONPATH, which in fault tests contains the template."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
