"""Start the emulated cloud in separate namespaces, run commands inside it, and stop it.

The network, mounts and hosts belong to the cloud's first process. When that process ends, the kernel removes them all,
so nothing remains on this machine.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from raymill import environment, settings, state_files
from raymill.common import cluster_file
from raymill.emulator import die_with_parent, host_image, packages
from raymill.emulator.addresses import CHECK_IP_PORT, ENDPOINT
from raymill.errors import UserError

STATE_FILE = settings.PROJECT / ".cluster" / "rehearsal.json"
LOG = STATE_FILE.with_suffix(".log")
START_TIMEOUT_S = 180  # starting usually takes seconds, and failure is noticed immediately
# The Debian package of each program that the emulator needs.
PROGRAMS = {
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "rsync": "rsync",
    "sudo": "sudo",
    "ip": "iproute2",
    "zstd": "zstd",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
# This script runs first in the cloud's mount namespace. It replaces /tmp with a private folder, and mounts the folders
# in VISIBLE there.
PREPARE = """
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=1777 tmpfs /mnt # until it is moved to /tmp
while read -r folder; do
    mkdir -p "/mnt/${folder#/tmp/}"
    mount --rbind "$folder" "/mnt/${folder#/tmp/}"
done < <(printf %s "$VISIBLE")
mount --move /mnt /tmp
exec "$@"
"""


def is_inside() -> bool:
    """Return whether this process runs inside the cloud."""
    return cluster_file.REHEARSAL in os.environ


def is_running() -> bool:
    """Return whether a cloud is running."""
    return _process() is not None


def unsupported_reason() -> str:
    """Return why the emulator cannot run on this machine and what to do, or "" if it can run."""
    if sys.platform != "linux":
        return "the emulated AWS needs Linux. On this system, use another --target."
    if missing := _missing_packages():
        sudo = "" if os.geteuid() == 0 else "sudo "
        return f"the emulated AWS needs programs that are not installed. Run: {sudo}apt-get install {' '.join(missing)}"
    if os.geteuid() != 0:
        return "the emulated AWS needs root, for namespaces and mounts. Run the verb with sudo."
    if (cache := host_image.uv_cache()).is_relative_to("/tmp"):
        return f"uv's cache, {cache}, is in /tmp, which emulated hosts cannot see. Set UV_CACHE_DIR to another folder."
    return ""


def _missing_packages() -> list[str]:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return sorted({package for program, package in PROGRAMS.items() if not shutil.which(program, path=path)})


def _install_programs() -> None:
    """Install missing programs if this process is root and apt-get exists. If not, `unsupported_reason` lists them."""
    needed = _missing_packages()
    if not needed or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    print(f"installing {' '.join(needed)} for the emulated AWS", flush=True)
    quiet: dict[str, Any] = {"env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, "stdout": subprocess.DEVNULL}
    subprocess.run(["apt-get", "update", "-qq"], **quiet)
    if subprocess.run(["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *needed], **quiet).returncode:
        raise UserError(
            f"apt-get failed; its errors are above. Fix the cause, then run: apt-get install {' '.join(needed)}"
        )
    # stop the ssh service: the emulator needs only the program sshd, and this machine must not accept logins
    if "openssh-server" in needed and shutil.which("systemctl"):
        subprocess.run(["systemctl", "disable", "--now", "ssh.service", "ssh.socket"], capture_output=True)


def start(region: str) -> None:
    """Start the cloud unless it is running. It outlives this process.

    Raises:
        UserError: the cloud cannot start.
    """
    if not _process():
        die_with_parent.detach(_start(region))


def _start(region: str) -> subprocess.Popen:
    """Start a cloud that ends with this process. Return its outermost process when the cloud is ready."""
    _install_programs()
    if reason := unsupported_reason():
        raise UserError(reason)
    STATE_FILE.parent.mkdir(exist_ok=True)
    pins = packages.fill_cache()
    needed = [settings.PROJECT, Path(sys.base_prefix), Path(sys.prefix), Path(environment.find_uv()).parent]
    needed += [Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    visible = "".join(f"{path}\n" for path in needed if path.is_relative_to("/tmp") and path.is_dir())
    namespaces = ("unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
    with LOG.open("w") as log:
        outer = die_with_parent.start(
            "raymill.emulator.cloud",
            region,
            str(pins),
            prefix=(*namespaces, "bash", "-c", PREPARE, "bash"),
            env=os.environ | {"VISIBLE": visible},
            stdout=log,
            stderr=log,
        )
    STATE_FILE.write_text(json.dumps({"pid": outer.pid, "created": psutil.Process(outer.pid).create_time()}))
    _wait_until_ready()
    return outer


def run(command: Sequence[str]) -> int:
    """Run `command` inside the cloud, as on the administrator's laptop, and return its exit code."""
    process = _process()
    if process is None:
        raise UserError("no emulated AWS is running. Run: inv up --target rehearsal")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAY_"))}
    variables |= {
        cluster_file.REHEARSAL: "1",
        "HOME": "/tmp/home",
        "CALLER_ADDRESS_URL": f"{ENDPOINT}:{CHECK_IP_PORT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    # nsenter ignores the terminal's signals, because it must outlive the command and reap it. The command handles them.
    enter = ["env", "--ignore-signal=INT,QUIT,HUP,TERM", "nsenter", "--target", str(_first_process(process).pid)]
    enter += ["--net", "--mount", "--pid", f"--wdns={settings.PROJECT}", "env", "--default-signal=INT,QUIT,HUP,TERM"]
    child = subprocess.Popen([*enter, *command], env=variables)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue  # the terminal also sent Ctrl-C to the child, which handles it


def run_in_fresh_cloud(module: str, *arguments: str) -> None:
    """Run a module in a new cloud, then stop the cloud. Exit with the module's exit code if that is not 0.

    Raises:
        UserError: the cloud cannot start, or part of it remains.
    """
    if is_running():
        print("stopping the running emulated AWS")
        stop()
    started = time.monotonic()
    with _start(cluster_file.load().region):
        print(f"an empty emulated AWS is up after {time.monotonic() - started:.0f} s", flush=True)
        code = run([sys.executable, "-m", module, *arguments])
        left = stop()
    if code:
        sys.exit(code)
    if left:
        raise UserError(f"left behind: {', '.join(left)}. Run: inv down --target rehearsal")
    print(f"done in {time.monotonic() - started:.0f} s: no process, mount or network is left")


def stop() -> list[str]:
    """Stop the cloud with everything in it, and return descriptions of what remains."""
    if process := _process():
        first = _first_process(process)
        network = _network(first.pid)
        process.kill()
        psutil.wait_procs([process, first], timeout=10)
        if left := [one for one in psutil.pids() if _network(one) == network]:
            return [f"process {one} of the emulated cloud" for one in left]
    STATE_FILE.unlink(missing_ok=True)
    packages.PINS.unlink(missing_ok=True)
    return []


def _process() -> psutil.Process | None:
    """Return the cloud's outermost process, or None if no cloud is running."""
    if not STATE_FILE.is_file():
        return None
    remedy = f"Run: rm {STATE_FILE}"
    state = state_files.parse_or_refuse(STATE_FILE.read_bytes(), dict[str, Any], str(STATE_FILE), remedy)
    try:
        process = psutil.Process(state["pid"])
        alive = process.create_time() == state["created"] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if alive else None


def _first_process(outer: psutil.Process) -> psutil.Process:
    """Return process 1 of the cloud's namespaces."""
    return outer.children()[0]


def _network(pid: int) -> str:
    """Return the id of a process's network namespace. If the process has ended, return an id that no namespace has."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return f"ended {pid}"


def _wait_until_ready() -> None:
    started = time.monotonic()
    while process := _process():
        if process.children() and Path("/proc", str(_first_process(process).pid), "root", "tmp/ready").exists():
            return
        if time.monotonic() - started > START_TIMEOUT_S:
            break
        time.sleep(0.1)
    stop()
    lines = [line for line in LOG.read_text(errors="replace").splitlines() if line.strip()] or ["its log is empty"]
    raise UserError(f"the emulated AWS did not start ({lines[-1]}). Read {LOG}, then try again.")
