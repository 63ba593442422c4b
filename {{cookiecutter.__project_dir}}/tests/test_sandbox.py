"""Test that an emulated cloud ends with the verb that started it, however that ends."""

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
from processes import read_all

import settings
from cluster import environment
from cluster.common import cluster_file
from cluster.emulator import packages, sandbox

pytestmark = pytest.mark.skipif(bool(sandbox.missing()), reason=sandbox.missing() or "it can run here")
ENDED_WITHIN_S = 10
WITHOUT_PACKAGES = (
    "from cluster.emulator import packages, sandbox; packages.fill_cache = lambda: 'requirements/local.txt'"
)
OWNER = f"{WITHOUT_PACKAGES}; sandbox.run_in_fresh_cloud('http.server')"
FILLING = "from cluster.emulator import packages; packages.fill_cache()"


def start(code: str, **variables: str) -> subprocess.Popen[str]:
    """Run a verb's code as a terminal would, in its own process group."""
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


@pytest.mark.parametrize("end", ENDINGS, ids=["SIGTERM", "SIGHUP", "SIGKILL", "Ctrl-C"])
def test_a_verb_that_is_killed_takes_its_cloud_along(end: Callable[[subprocess.Popen[str]], None]) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    with start(OWNER) as verb:
        assert verb.stdout
        assert any("Serving HTTP" in line for line in verb.stdout), "its module runs in the cloud"
        inside = processes_of_the_cloud()
        assert len(inside) >= 3  # the cloud, the module, and what entered the cloud for it
        end(verb)
        assert alive_after_patience(inside) == []
    assert not sandbox.is_running()
    assert Path("/proc/self/mounts").read_text() == mounts


def test_the_cloud_of_up_outlives_its_verb() -> None:
    try:
        with start(f"{WITHOUT_PACKAGES}; sandbox.start('{cluster_file.load().region}')") as verb:
            assert verb.wait() == 0
        time.sleep(1)  # a cloud that ended with its verb would take a moment
        assert sandbox.run(["true"]) == 0
    finally:
        assert sandbox.end() == []


@pytest.mark.parametrize("end", ENDINGS, ids=["SIGTERM", "SIGHUP", "SIGKILL", "Ctrl-C"])
def test_a_verb_that_is_killed_ends_what_fills_the_package_cache(
    end: Callable[[subprocess.Popen[str]], None], tmp_path: Path
) -> None:
    uv, started = tmp_path / "uv", tmp_path / "started"
    started.touch()
    uv.write_text(f"#!/bin/sh\necho $$ > {started}\nsleep 600\n")
    uv.chmod(0o755)
    with start(FILLING, UV=str(uv)) as verb:
        while not (told := started.read_text()):
            assert verb.poll() is None
            time.sleep(0.05)
        below = psutil.Process(verb.pid).children(recursive=True)
        assert int(told) in [process.pid for process in below]
        end(verb)
        assert alive_after_patience(below) == []


def test_a_killed_cloud_leaves_nothing_and_the_next_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "fill_cache", lambda: environment.PINS)
    region = cluster_file.load().region
    sandbox.start(region)
    inside = processes_of_the_cloud()
    try:
        inside[0].kill()
        assert alive_after_patience(inside) == []
        assert not sandbox.is_running()
        sandbox.start(region)
        assert sandbox.is_running()
    finally:
        assert sandbox.end() == []


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a PATH without two programs and with a stub of apt-get. Return the file with apt-get's arguments."""
    told, programs = tmp_path / "told", tmp_path / "bin"
    programs.mkdir()
    installing = f'if [ $1 = install ]; then cp "$0" {programs}/rsync; cp "$0" {programs}/sudo; fi'
    apt = f'echo "$@" >> {told}\n{installing}\n'
    for name, body in {"apt-get": apt, "systemctl": f'echo systemctl "$@" >> {told}\n'}.items():
        (programs / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{body}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    present = {name: package for name, package in sandbox.PROGRAMS.items() if name in ("rsync", "sudo")}
    monkeypatch.setattr(sandbox, "PROGRAMS", present)
    return told


def test_as_root_the_programs_are_installed(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox._install_programs()
    assert capsys.readouterr().out == "installing rsync sudo for the rehearsal\n"
    assert bare.read_text().splitlines() == [
        "update -qq",
        "install --yes -qq --no-install-recommends rsync sudo",
    ]
    sandbox._install_programs()
    assert len(bare.read_text().splitlines()) == 2, "nothing is installed twice"


def test_the_sshd_that_is_installed_does_not_listen(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PROGRAMS", {"no-such-sshd": "openssh-server"})
    sandbox._install_programs()
    assert bare.read_text().splitlines()[-1] == "systemctl disable --now ssh.service ssh.socket"


def test_where_it_cannot_install_it_says_what_to_type(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(settings.UserError, match="Run: sudo apt-get install rsync sudo"):
        sandbox.start(cluster_file.load().region)
    assert not bare.exists(), "apt-get was not run"


def processes_of_the_cloud() -> list[psutil.Process]:
    """Return the running cloud's processes, the outermost one first."""
    outer = psutil.Process(json.loads(sandbox.FILE.read_text())["pid"])
    network = sandbox._network(outer.pid)
    return [outer, *(process for process in psutil.process_iter() if sandbox._network(process.pid) == network)]


def alive_after_patience(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that do not end in time. Zombies of a container do not count."""
    deadline = time.monotonic() + ENDED_WITHIN_S
    while alive := [one for one, state in read_all(processes, state_of) if state != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return alive


def state_of(process: psutil.Process) -> tuple[psutil.Process, str]:
    return process, process.status()
