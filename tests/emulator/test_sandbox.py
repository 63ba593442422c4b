"""Test which processes end with the verb that started them, and that missing programs are installed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from raymill import environment, settings
from raymill.common import cluster_file
from raymill.emulator import packages, sandbox
from raymill.errors import UserError

pytestmark = pytest.mark.skipif(bool(sandbox.unsupported_reason()), reason=sandbox.unsupported_reason() or "supported")
TIMEOUT_S = 10
DNS_TIMEOUT_S = 5  # glibc's default, before it tries again
WITHOUT_PACKAGES = (
    "from raymill.emulator import packages, sandbox; packages.fill_cache = lambda: 'requirements/local.txt'"
)
IN_CLOUD = f"{WITHOUT_PACKAGES}; sandbox.run_in_fresh_cloud('http.server')"
FILL_CACHE = "from raymill.emulator import packages; packages.fill_cache()"


def start(code: str, **variables: str) -> subprocess.Popen[str]:
    """Start a verb's code in its own process group, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=settings.PROJECT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | variables,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupt(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def hang_up(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGHUP)


ENDINGS = [subprocess.Popen.terminate, hang_up, subprocess.Popen.kill, interrupt]
NAMES = ["SIGTERM", "SIGHUP", "SIGKILL", "Ctrl-C"]
RARE = [pytest.param(end, marks=pytest.mark.nightly) for end in ENDINGS[:2]]


@pytest.mark.parametrize("end", [*RARE, *ENDINGS[2:]], ids=NAMES)
def test_the_cloud_of_a_killed_verb_ends(end: Callable[[subprocess.Popen[str]], None]) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    with start(IN_CLOUD) as verb:
        assert verb.stdout
        assert any("Serving HTTP" in line for line in verb.stdout), "the module does not run in the cloud"
        inside = processes_of_the_cloud()
        assert len(inside) >= 3  # the cloud, the module, and the process that entered the cloud to start the module
        end(verb)
        assert survivors(inside) == []
    assert not sandbox.is_running()
    assert Path("/proc/self/mounts").read_text() == mounts


def test_the_cloud_of_up_outlives_its_verb() -> None:
    try:
        with start(f"{WITHOUT_PACKAGES}; sandbox.start('{cluster_file.load().region}')") as verb:
            assert verb.wait() == 0
        time.sleep(1)  # long enough for the cloud to end, if it depended on the process that started it
        assert sandbox.run(["true"]) == 0
        started = time.monotonic()
        assert sandbox.run(["getent", "hosts", "example.org"]) != 0
        assert time.monotonic() - started < DNS_TIMEOUT_S, "a lookup waits for a name server that it cannot reach"
    finally:
        assert sandbox.stop() == []


@pytest.mark.parametrize("end", ENDINGS, ids=NAMES)
def test_the_package_download_of_a_killed_verb_ends(
    end: Callable[[subprocess.Popen[str]], None], tmp_path: Path
) -> None:
    uv, started = tmp_path / "uv", tmp_path / "started"
    started.touch()
    uv.write_text(f"#!/bin/sh\necho $$ > {started}\nsleep 600\n")
    uv.chmod(0o755)
    with start(FILL_CACHE, UV=str(uv)) as verb:
        while not (pid := started.read_text()):
            assert verb.poll() is None
            time.sleep(0.05)
        below = psutil.Process(verb.pid).children(recursive=True)
        assert int(pid) in [process.pid for process in below]
        end(verb)
        assert survivors(below) == []


def test_a_killed_cloud_leaves_nothing_and_the_next_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "fill_cache", lambda: environment.PINS)
    region = cluster_file.load().region
    sandbox.start(region)
    inside = processes_of_the_cloud()
    try:
        inside[0].kill()
        assert survivors(inside) == []
        assert not sandbox.is_running()
        sandbox.start(region)
        assert sandbox.is_running()
    finally:
        assert sandbox.stop() == []


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set PATH to stubs of apt-get and systemctl, without rsync and sudo. Return the file where they record calls."""
    calls, programs = tmp_path / "calls", tmp_path / "bin"
    programs.mkdir()
    installing = f'if [ $1 = install ]; then cp "$0" {programs}/rsync; cp "$0" {programs}/sudo; fi'
    apt = f'echo "$@" >> {calls}\n{installing}\n'
    for name, body in {"apt-get": apt, "systemctl": f'echo systemctl "$@" >> {calls}\n'}.items():
        (programs / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{body}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    present = {name: package for name, package in sandbox.PROGRAMS.items() if name in ("rsync", "sudo")}
    monkeypatch.setattr(sandbox, "PROGRAMS", present)
    return calls


def test_root_installs_missing_programs(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox._install_programs()
    assert capsys.readouterr().out == "installing rsync sudo for the emulated AWS\n"
    assert calls.read_text().splitlines() == [
        "update -qq",
        "install --yes -qq --no-install-recommends rsync sudo",
    ]
    sandbox._install_programs()
    assert len(calls.read_text().splitlines()) == 2, "the programs were installed twice"


def test_a_newly_installed_sshd_is_disabled(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PROGRAMS", {"no-such-sshd": "openssh-server"})
    sandbox._install_programs()
    assert calls.read_text().splitlines()[-1] == "systemctl disable --now ssh.service ssh.socket"


def test_without_root_it_says_what_to_install(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="Run: sudo apt-get install rsync sudo"):
        sandbox.start(cluster_file.load().region)
    assert not calls.exists(), "apt-get was run"


def processes_of_the_cloud() -> list[psutil.Process]:
    """Return the running cloud's processes, the outermost first."""
    outer = psutil.Process(json.loads(sandbox.STATE_FILE.read_text())["pid"])
    network = sandbox._network(outer.pid)
    return [outer, *(process for process in psutil.process_iter() if sandbox._network(process.pid) == network)]


def survivors(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait for these processes to end, and return those that are still alive after TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process is running. Zombies do not count: a container without init keeps them."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
