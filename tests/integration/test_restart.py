"""Test that `inv up` notices a new watchdog that does not work, with real processes in place of the watchdogs."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymill import settings
from raymill.node import process, restart, state

WORKS = """
from raymill.node import process
process.take_over("watchdog")
import pathlib, sys, time
while True:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(0.1)
"""
BROKEN = {
    "it ends before it takes over": f"raise SystemExit\n{WORKS}",
    "its file is not valid Python": "this is not Python",
    "it ends when it has taken over": WORKS.replace("import pathlib", "raise SystemExit\nimport pathlib"),
    "it runs, but does not renew the lease": WORKS.replace("    pathlib.Path(sys.argv[1]).touch()\n", ""),
}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the home folder of a node whose watchdog renews the lease. End that watchdog afterwards."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(settings.PROJECT))
    monkeypatch.setattr(restart, "TIMEOUT_S", 4.0)
    monkeypatch.setattr(state, "LEASE", tmp_path / "lease")
    monkeypatch.setattr(state, "LOG_FILE", tmp_path / "watchdog.log")
    assert restart._restart_here([command(tmp_path, WORKS)]) == ""
    yield tmp_path
    if watchdog := process.running("watchdog"):
        watchdog.kill()


def command(home: Path, code: str) -> str:
    """Return a start command as in cluster.yaml, for a watchdog with this code."""
    (home / "code.py").write_text(code)
    program = f"'{sys.executable}' '{home}/code.py' '{home}/lease' -m raymill.node.watchdog"
    return f"cd '{home}' && nohup {program} >> watchdog.log 2>&1 < /dev/null &"


def test_a_new_watchdog_replaces_the_earlier_one(node: Path) -> None:
    earlier = process.running("watchdog")
    assert earlier
    assert restart._restart_here([command(node, WORKS)]) == ""
    assert not earlier.is_running() or earlier.status() == "zombie"
    assert process.running("watchdog") not in (None, earlier)


@pytest.mark.parametrize("code", BROKEN.values(), ids=list(BROKEN))
def test_a_new_watchdog_that_does_not_work_is_named(node: Path, code: str) -> None:
    """Also if the earlier one still runs, and renews the lease."""
    found = restart._restart_here([command(node, code)])
    assert found.startswith(f"the watchdog of {os.uname().nodename} does not work with the new code (")


def test_other_start_commands_are_not_run_again(node: Path) -> None:
    restart._restart_here([f"touch '{node}/stopped'; ray stop", command(node, WORKS)])
    assert not (node / "stopped").exists()
