"""Run Ray's launcher on the file that launcher_file.py writes, and show its progress in a few lines."""

import re
import subprocess
import sys
import time

from ray.autoscaler import sdk

from raymill import settings
from raymill.aws.launcher_file import FILE
from raymill.common import aws_session, cluster_file
from raymill.console import Console
from raymill.errors import UserError
from raymill.ray_support.private import cluster_launcher

LOG = settings.PROJECT / ".cluster" / "up.log"
COPY = "rsync-up"
STEP = re.compile(r"updater\.py.*\[(\d+)/(\d+)\]\s+(.*)")
COLOR = re.compile(r"\x1b\[[\d;]*m")


def up() -> None:
    """Run `ray up .cluster/cluster.yaml`. Raises `UserError` with its last line of output if it fails."""
    took = _run("up", "--yes", "--no-config-cache")
    print(f"`ray up` took {took:.0f} s")


def copy_files() -> None:
    """Copy the `file_mounts` to the running head. Raises `UserError` if that fails."""
    _run(COPY)


def _run(name: str, *options: str) -> float:
    """Run a command of Ray's launcher, and return the seconds that it took."""
    LOG.parent.mkdir(exist_ok=True)
    started = time.monotonic()
    command = [sys.executable, "-m", __name__, name, *options, str(FILE)]
    # if they expire soon, AWS asks for another code now, and not below the progress
    aws_session.credentials(cluster_file.load().region)
    step = "asking AWS"
    with LOG.open("w") as log, Console().status(step) as spinner:
        # the file mounts are relative to the working directory
        process = subprocess.Popen(
            command, cwd=settings.PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout
        for line in process.stdout:
            log.write(line)
            log.flush()
            if found := STEP.search(COLOR.sub("", line)):
                step = f"head, step {found[1]} of {found[2]}: {found[3].strip().lower()}"
                if not spinner.console.is_terminal:
                    print(f"{time.monotonic() - started:4.0f} s  {step}", flush=True)
            spinner.update(f"{step} ({time.monotonic() - started:.0f} s)")
        code = process.wait()
    if code:
        raise UserError(
            f"`ray {name}` failed ({step}): {_reason()}. Its output is in {LOG.relative_to(settings.PROJECT)}"
        )
    return time.monotonic() - started


def _reason() -> str:
    """Return the last line of the failed command's output. Skip ssh's messages, and Ray's, which begin with a date."""
    text = COLOR.sub("", LOG.read_text(errors="replace")).partition("update-failed")[0]
    noise = r"\d{4}-\d\d-\d\d |Shared connection|Warning: Permanently added"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.match(noise, line)]
    return lines[-1][:300] if lines else "no output"


if __name__ == "__main__":  # the process that `_run` starts
    aws_session.start(cluster_file.load().region)
    if sys.argv[1] == COPY:
        # Ray's own command would read a cached configuration from /tmp, which another user of this machine may write
        sdk.rsync(sys.argv[2], source=None, target=None, down=False, no_config_cache=True)
    else:
        cluster_launcher.main()
