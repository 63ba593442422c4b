"""What the rows of the drill are made of: a cluster that is up, faults, jobs, the verbs, and patience."""

import contextlib
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

import settings
from cluster import submission
from cluster.aws import head, ssh
from cluster.aws import target as aws
from cluster.aws.ssh import SshHead
from cluster.common import cluster_file, instances
from cluster.common.cluster_file import ClusterFile
from cluster.emulator import scenario
from cluster.target import Connection

VERB_TIMEOUT_S = 600
USUAL_START_S = 0.6  # for `import ray` on two idle cores
MOST_SLOWNESS = 5.0  # a row still has to show that the cluster recovers in minutes


class Stage:
    """The cluster of cluster.yaml as a row finds it."""

    def __init__(self) -> None:
        self.file: ClusterFile = cluster_file.load()
        self.connection: Connection

    def set_up(self) -> None:
        """Bring the cluster up, unless it is; a row may have ended or changed it."""
        target = aws.Aws()
        said, started = io.StringIO(), time.monotonic()
        try:
            with contextlib.redirect_stdout(said):  # the same fifty lines for each row
                target.up(yes=True)
        except settings.UserError:
            print(said.getvalue())
            raise
        print(f"up after {time.monotonic() - started:.0f} s", flush=True)
        scenario.shorten_idle_timeout(self.file)
        self.connection = target.connect()

    def head(self) -> SshHead:
        return ssh.find_head(self.file)

    def report(self) -> dict[str, Any]:
        """What head_status.py says."""
        return head.read_status(self.head())

    def workers(self) -> list[instances.Instance]:
        return [machine for machine in instances.living(self.file) if machine.node_type != self.file.head.name]

    def wait_until_alone(self) -> None:
        wait_for(lambda: not self.workers(), 120, "workers of the row before to leave")

    # ------------------------------------------------------------ jobs

    def submit(self, code: str, *arguments: str, with_secrets: bool = False) -> str:
        """Run Python code as a job, in the project's folder; returns Ray's id of the job."""
        environment: dict[str, Any] = {"working_dir": str(settings.PROJECT), "excludes": submission.EXCLUDES}
        environment["env_vars"] = dict(self.connection.job_variables)
        if with_secrets:
            environment["env_vars"]["SECRET_NAMES"] = "HF_TOKEN"
            environment["worker_process_setup_hook"] = submission.SECRETS_HOOK
        words = " ".join(arguments)
        return self.connection.client().submit_job(entrypoint=f'python -c "{code}" {words}', runtime_env=environment)

    @functools.cached_property
    def undisturbed_loss(self) -> float:
        """The last loss of a fine-tuning that nothing happens to."""
        return last_loss(self.ended(self.train("calm"), 300))

    def train(self, name: str, *options: str) -> str:
        """Submit a fine-tuning of a minute on two A100 machines, with a checkpoint every five of its 30 steps."""
        words = [word for word in scenario.TRAINING if word != "--fresh"]
        words += ["--steps", "30", "--log-every", "5", "--checkpoint-every", "5", "--global-batch-rows", "48"]
        return submission.submit(self.connection, "finetune_ddp", [*words, "--name", name, *options])

    def stop_jobs(self) -> None:
        """A row that failed leaves its job behind."""
        client = self.connection.client()
        for job in client.list_jobs():
            if job.submission_id and not job.status.is_terminal():
                client.stop_job(job.submission_id)

    def log(self, job: str) -> str:
        """What a job printed; Ray's own line with the job's code would contain every word that a row looks for."""
        lines = self.connection.client().get_job_logs(job).splitlines()
        return "\n".join(line for line in lines if not line.startswith("Running entrypoint"))

    def is_running(self, job: str) -> bool:
        return self.connection.client().get_job_status(job) == "RUNNING"

    def ended(self, job: str, patience_s: float = 240) -> str:
        """The log of a job that has ended well."""
        client = self.connection.client()
        wait_for(lambda: client.get_job_status(job).is_terminal(), patience_s, f"{job} to end")
        assert client.get_job_status(job) == "SUCCEEDED", self.log(job)[-2000:]
        return self.log(job)


def last_loss(log: str) -> float:
    """Of a fine-tuning that went through all of its steps."""
    found = re.findall(r"step 30/30  loss ([\d.]+)", log)
    assert found, log
    return float(found[-1])


# ---------------------------------------------------------------- faults


def tell(**what: Any) -> None:
    """Tell the cloud (see cloud.Control)."""
    request = urllib.request.Request(scenario.CONTROL, data=json.dumps(what).encode(), method="PUT")
    urllib.request.urlopen(request).close()


@contextlib.contextmanager
def no_capacity(*launches: dict[str, Any]) -> Iterator[None]:
    """Launches that are so described find no machine (see api.Faults)."""
    tell(faults={"no_capacity": launches})
    try:
        yield
    finally:
        tell(faults={"no_capacity": []})


@contextlib.contextmanager
def covered(path: Path, text: str) -> Iterator[None]:
    """Show another text in the place of a file, inside the cloud only: the file itself is not written.

    Where there is none, an empty one lies there meanwhile.
    """
    cover = Path("/tmp/covers", path.name)
    cover.parent.mkdir(exist_ok=True)
    cover.write_text(text)
    is_new = not path.exists()
    path.touch(mode=0o600)
    subprocess.run(["mount", "--bind", cover, path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)
        if is_new:
            path.unlink()


def changed_cluster_file(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """cluster.yaml with other values at its top."""
    content = yaml.safe_load(cluster_file.FILE.read_text()) | changes
    return covered(cluster_file.FILE, yaml.safe_dump(content, sort_keys=False))


# ---------------------------------------------------------------- the verbs, as a person types them


def verb(*words: str, expect: int = 0, folder: Path = settings.PROJECT, **variables: str) -> str:
    """What a verb prints; it has to end with the code that is expected."""
    done = subprocess.run(
        _verb(*words),
        cwd=folder,
        env=os.environ | {"COLUMNS": "2000"} | variables,  # no sentence is broken into lines
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=VERB_TIMEOUT_S * slowness(),
    )
    assert done.returncode == expect, f"inv {' '.join(words)} ended with {done.returncode}: {done.stdout[-1000:]}"
    return done.stdout


def interrupt(marker: str, *words: str) -> str:
    """Type Ctrl-C when a verb prints `marker`; returns its last line."""
    process = subprocess.Popen(
        _verb(*words),
        cwd=settings.PROJECT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    for line in process.stdout:
        if marker in line:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the foreground
            break
    rest = process.stdout.read()
    assert process.wait(60 * slowness()) == 130, rest
    return rest.strip().splitlines()[-1]


def _verb(*words: str) -> list[str]:
    return [sys.executable, "-m", "invoke", *words, "--target", "rehearsal"]


# ---------------------------------------------------------------- patience


@functools.cache
def slowness() -> float:
    """Return how many times longer than usual this machine takes to start a process that imports Ray, at least 1."""
    for _ in range(2):  # the first one reads Ray from the disk
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", "import ray"], check=True)
    return min(max(1.0, (time.monotonic() - started) / USUAL_START_S), MOST_SLOWNESS)


def wait_for(condition: Callable[[], Any], patience_s: float, what: str) -> float:
    """Wait until the condition holds; returns the seconds that it took.

    `patience_s`: on a machine of the usual speed; a slow one has longer. Raises AssertionError when it never did.
    """
    started, patience_s = time.monotonic(), patience_s * slowness()
    while not condition():
        assert time.monotonic() < started + patience_s, f"waited {patience_s:.0f} s for {what}"
        time.sleep(1)
    return time.monotonic() - started
