"""Starts the emulated cloud in namespaces of its own, runs commands inside, and ends it.

The cloud's first process holds everything: its network, its mounts, its hosts. When that one ends, killed or not, the
kernel ends them all, so that nothing can be left on this machine.
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

import settings
from cluster import environment
from cluster.common import cluster_file
from cluster.emulator import image, owner, packages
from cluster.emulator.addresses import CALLER_ADDRESS_PORT, ENDPOINT

STATE = settings.PROJECT / ".cluster"
FILE = STATE / "rehearsal.json"
LOG = STATE / "rehearsal.log"
START_TIMEOUT_S = 180  # usually seconds; a cloud that fails is detected at once
# The programs that the rehearsal needs, and the Debian package of each.
PROGRAMS = {
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "rsync": "rsync",
    "sudo": "sudo",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
# Runs before the cloud, in its mount namespace: gives it a /tmp of its own, in which what it needs stays visible.
PREPARE = """
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=1777 tmpfs /mnt # only until it moves; no folder is made on this machine
while read -r kept; do
    mkdir -p "/mnt/${kept#/tmp/}"
    mount --rbind "$kept" "/mnt/${kept#/tmp/}"
done < <(printf %s "$KEPT")
mount --move /mnt /tmp
exec "$@"
"""


def is_inside() -> bool:
    """Whether this process runs in the cloud's namespaces."""
    return cluster_file.REHEARSAL in os.environ


def is_running() -> bool:
    """Whether there is a cloud to enter."""
    return _process() is not None


def missing() -> str:
    """What keeps this machine from rehearsing, and what to type; empty when nothing does."""
    if sys.platform != "linux":
        return "the rehearsal needs Linux; on this system use the other targets."
    if packages := _missing_packages():
        sudo = "" if os.geteuid() == 0 else "sudo "
        return f"the rehearsal needs programs that are not installed. Run: {sudo}apt-get install {' '.join(packages)}"
    if os.geteuid() != 0:
        return "the rehearsal needs root, for namespaces and mounts; run the verb again with sudo."
    if (cache := image.uv_cache()).is_relative_to("/tmp"):
        return f"hosts have a /tmp of their own, and uv's cache, {cache}, is there; set UV_CACHE_DIR to another folder."
    return ""


def _missing_packages() -> list[str]:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return sorted({package for program, package in PROGRAMS.items() if not shutil.which(program, path=path)})


def _install_programs() -> None:
    """Install missing programs if this process is root and has apt-get. Otherwise `missing` says what to run."""
    needed = _missing_packages()
    if not needed or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    print(f"installing {' '.join(needed)} for the rehearsal", flush=True)
    quiet: dict[str, Any] = {"env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, "stdout": subprocess.DEVNULL}
    subprocess.run(["apt-get", "update", "-qq"], **quiet)
    if subprocess.run(["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *needed], **quiet).returncode:
        raise settings.UserError(
            f"apt-get failed; its output is above. Fix that, then run: apt-get install {' '.join(needed)}"
        )
    # only the program is needed: this machine must not accept logins
    if "openssh-server" in needed and shutil.which("systemctl"):
        subprocess.run(["systemctl", "disable", "--now", "ssh.service", "ssh.socket"], capture_output=True)


def start(region: str) -> None:
    """Start the cloud unless it is running. It outlives this process.

    Raises:
        settings.UserError: the cloud cannot start.
    """
    if not _process():
        owner.release(_start(region))


def _start(region: str) -> subprocess.Popen:
    """Start a cloud that ends with this process. Return its outermost process once the cloud is ready."""
    _install_programs()
    if reason := missing():
        raise settings.UserError(reason)
    STATE.mkdir(exist_ok=True)
    pins = packages.fill_cache()
    needed = [settings.PROJECT, Path(sys.base_prefix), Path(sys.prefix), Path(environment.find_uv()).parent]
    kept = "".join(f"{path}\n" for path in needed if path.is_relative_to("/tmp"))
    namespaces = ("unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
    with LOG.open("w") as log:
        outer = owner.start(
            "cluster.emulator.cloud",
            region,
            str(pins),
            prefix=(*namespaces, "bash", "-c", PREPARE, "bash"),
            env=os.environ | {"KEPT": kept},
            stdout=log,
            stderr=log,
        )
    FILE.write_text(json.dumps({"pid": outer.pid, "created": psutil.Process(outer.pid).create_time()}))
    _wait_until_ready()
    return outer


def run(command: Sequence[str]) -> int:
    """Run `command` inside the cloud's network and mounts, as its administrator's laptop; returns its exit code."""
    process = _process()
    if process is None:
        raise settings.UserError("no rehearsal runs; start one with: inv up --target rehearsal")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAY_"))}
    variables |= {
        cluster_file.REHEARSAL: "1",
        "HOME": "/tmp/home",
        "CALLER_ADDRESS_URL": f"{ENDPOINT}:{CALLER_ADDRESS_PORT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    # the terminal's signals are for the command: nsenter must outlive it, because only nsenter can reap it
    enter = ["env", "--ignore-signal=INT,QUIT,HUP,TERM", "nsenter", "--target", str(_first(process).pid)]
    enter += ["--net", "--mount", "--pid", f"--wdns={settings.PROJECT}", "env", "--default-signal=INT,QUIT,HUP,TERM"]
    child = subprocess.Popen([*enter, *command], env=variables)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue  # the terminal sent it to the child too, which decides what it means


def run_in_fresh_cloud(module: str, *arguments: str) -> list[str]:
    """Run a module of this project in a cloud of its own, which then ends; returns what is left of it, in words.

    Ends this process with the module's exit code where that is not 0.
    """
    if is_running():
        print("ending the rehearsal that is up")
        end()
    started = time.monotonic()
    with _start(cluster_file.load().region):
        print(f"an empty cloud is up after {time.monotonic() - started:.0f} s", flush=True)
        code = run([sys.executable, "-m", module, *arguments])
        left = end()
    if code:
        sys.exit(code)
    if not left:
        print(f"from nothing to nothing in {time.monotonic() - started:.0f} s: no process, mount or network is left")
    return left


def end() -> list[str]:
    """End the cloud and all that runs in it; returns what is left, in words."""
    if process := _process():
        first = _first(process)
        network = _network(first.pid)
        process.kill()
        psutil.wait_procs([process, first], timeout=10)
        if left := [one for one in psutil.pids() if _network(one) == network]:
            return [f"process {one} of the emulated cloud" for one in left]
    FILE.unlink(missing_ok=True)
    packages.PINS.unlink(missing_ok=True)
    return []


def _process() -> psutil.Process | None:
    """The process that holds the cloud; None when it does not run."""
    if not FILE.is_file():
        return None
    state = json.loads(FILE.read_text())
    try:
        process = psutil.Process(state["pid"])
        alive = process.create_time() == state["created"] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if alive else None


def _first(outer: psutil.Process) -> psutil.Process:
    """The cloud itself, which is process 1 of its namespaces."""
    return outer.children()[0]


def _network(pid: int) -> str:
    """Which network a process is in; nothing is the answer for one that has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return f"ended {pid}"


def _wait_until_ready() -> None:
    started = time.monotonic()
    while process := _process():
        if process.children() and Path("/proc", str(_first(process).pid), "root", "tmp/ready").exists():
            return
        if time.monotonic() - started > START_TIMEOUT_S:
            break
        time.sleep(0.1)
    end()
    words = [line for line in LOG.read_text(errors="replace").splitlines() if line.strip()] or ["it said nothing"]
    raise settings.UserError(f"the emulated cloud did not start ({words[-1]}): read {LOG}, then try again")
