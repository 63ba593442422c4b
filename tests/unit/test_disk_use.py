"""Test that a full disk is noticed, and ends none of this project's processes on a node."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import full_disk
import pytest
from sleeping import in_this_thread

from raymill import settings
from raymill.common import bucket, cluster_file, instances
from raymill.common.limits import LimitsSection
from raymill.node import (
    disk_use,
    gpu_use,
    log_shipping,
    notices,
    process,
    spending,
    state,
    watchdog_head,
    watchdog_worker,
)

FILE = cluster_file.load()
GB = 10**9
FULL_LOG = """
import sys
from raymill.node import process
process.write_log()
for _ in range(3):
    process.log.warning("no space for this line")
print("survived", file=sys.stdout)
"""


class Over(Exception):
    """Ends a function that would never return."""


def disk(monkeypatch: pytest.MonkeyPatch, size: float, free: float) -> None:
    values = SimpleNamespace(f_frsize=1, f_blocks=size * GB, f_bavail=free * GB)
    monkeypatch.setattr(disk_use.os, "statvfs", lambda folder: values)


@pytest.mark.parametrize(
    ("size", "free", "is_full"),
    [(500, 21, False), (500, 19, True), (50, 6, False), (50, 4, True), (30_000, 2_000, False), (500, 0, True)],
)
def test_a_disk_is_nearly_full(monkeypatch: pytest.MonkeyPatch, size: float, free: float, is_full: bool) -> None:
    disk(monkeypatch, size, free)
    problem = disk_use.problem()
    assert bool(problem) == is_full
    assert not is_full or f"{free:.1f} of {size} GB free on the disk with {Path.home()}" in problem


def test_a_log_on_a_full_disk_ends_no_process() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", FULL_LOG], cwd=settings.PROJECT, stdout=subprocess.PIPE, stderr=full, check=True
        )
    assert done.stdout == b"survived\n"


def test_a_process_starts_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path, text: str) -> None:
        raise OSError("No space left on device")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Path, "write_text", fail)
    process.take_over("pretended")


class Cluster:
    """What the watchdog has done, on a head whose disk is full."""

    def __init__(self) -> None:
        self.done: list[str] = []


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Let all writes to the head's disk fail, also those to its log."""
    made = Cluster()
    disk(monkeypatch, 500, 0)
    for name in ("LEASE", "LAUNCHED"):
        monkeypatch.setattr(watchdog_head, name, tmp_path / name)
    watchdog_head.LAUNCHED.touch()
    full_disk.fill(monkeypatch, tmp_path / "watchdog.json", tmp_path / "ray.json")
    monkeypatch.setattr(state, "STATE_FILE", tmp_path / "watchdog.json")
    monkeypatch.setattr(state, "STATE_WITHOUT_DISK", tmp_path / "memory.json")
    monkeypatch.setattr(watchdog_head, "RAY_CONFIG", tmp_path / "ray.json")
    types = {one.name: {"max_workers": 9} for one in FILE.workers}
    watchdog_head.RAY_CONFIG.write_text(f'{{"available_node_types": {types}}}'.replace("'", '"'))
    monkeypatch.setattr(watchdog_head.autoscaler_log, "LOGS", tmp_path)
    log = Path("/dev/full").open("w")  # noqa: SIM115 - it is never closed, because that would raise
    monkeypatch.setattr("builtins.print", lambda *values, file=log, **options: file.write("x" * 100_000))
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(log)])
    monkeypatch.setattr(watchdog_head, "stop_autoscaler", lambda: made.done.append("no autoscaler"))
    worker = SimpleNamespace(id="i-1", node_type="cpu", state="running")
    monkeypatch.setattr(instances, "living", lambda file: [worker])
    monkeypatch.setattr(instances, "failed_launches", lambda file: [])
    monkeypatch.setattr(instances, "terminate", lambda file, ids: made.done.append(f"terminate {ids}"))
    monkeypatch.setattr(bucket, "leave_note", lambda file, reason: made.done.append(reason))
    monkeypatch.setattr(notices, "send", lambda text: made.done.append(f"notice: {text}"))
    monkeypatch.setattr(subprocess, "run", lambda command, check: made.done.append(" ".join(command)))
    monkeypatch.setattr(time, "sleep", in_this_thread(_over))
    monkeypatch.setattr(spending.Spending, "add", lambda self, running, seconds: 1.0)
    return made


def _over(seconds: float) -> None:
    raise Over


def set_limits(monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
    section = LimitsSection.model_validate({"hours": 24, "dollars": 500} | limits)
    monkeypatch.setattr(watchdog_head.limits, "load", lambda: section)


def test_on_a_full_disk_the_watchdog_works_and_its_state_is_known(
    full: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch)
    watchdog = watchdog_head.HeadWatchdog(FILE)
    for _ in range(2):
        watchdog.check()
    assert watchdog_head.LEASE.exists()
    assert state.read_watchdog()["limits"]["dollars"] == 500
    assert full.done == [], "the cluster is not ended"


@pytest.mark.parametrize("limit", ["hours", "dollars", "idle_hours"])
def test_each_limit_ends_a_cluster_whose_head_has_a_full_disk(
    full: Cluster, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Before, the first line in the log ended the watchdog before it checked a limit."""
    hour_ago = time.time() - 3601
    os.utime(watchdog_head.LAUNCHED, (hour_ago, hour_ago))
    monkeypatch.setattr(watchdog_head, "STARTED", hour_ago)
    monkeypatch.setattr(watchdog_head.Activity, "check", lambda self, now: None)
    set_limits(monkeypatch, **{limit: 1.0})
    monkeypatch.setattr(spending.Spending, "dollars", 2.0)
    with pytest.raises(Over):
        watchdog_head.HeadWatchdog(FILE).check()
    stopped, terminated, reason, notice, shutdown = full.done
    assert (stopped, terminated, shutdown) == ("no autoscaler", "terminate ['i-1']", "sudo shutdown -h now")
    assert limit in reason
    assert "has 0.0 of 500 GB free" in reason
    assert reason in notice


def test_the_autoscaler_is_stopped_without_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would replace the workers. A full disk has no room for another configuration."""
    monkeypatch.setattr(watchdog_head, "RAY_CONFIG", tmp_path / f"{tmp_path.name}.yaml")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    configs = [f"~/{tmp_path.name}.yaml", f"{tmp_path}/{tmp_path.name}.yaml", "~/other.yaml"]
    started = [subprocess.Popen([*command, f"--autoscaling-config={config}"]) for config in configs]
    try:
        watchdog_head.stop_autoscaler()
        assert [process.wait(timeout=10) for process in started[:2]] == [-9, -9]
        assert started[2].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "broken",
    [(instances, "living"), (instances, "terminate"), (bucket, "leave_note"), (notices, "send")],
    ids=lambda one: one[1],
)
def test_no_step_prevents_the_shutdown(full: Cluster, monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, str]) -> None:
    def fail(*values: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(*broken, fail)
    with pytest.raises(Over):
        watchdog_head.end_cluster(FILE, "the limit is reached")
    assert full.done[-1] == "sudo shutdown -h now"


def test_a_worker_with_a_full_disk_keeps_its_lease_and_is_drained(
    full: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_worker, "LEASE", tmp_path / "lease")
    monkeypatch.setattr(watchdog_worker, "answers", lambda head: True)
    monkeypatch.setattr(watchdog_worker, "spot_notice", lambda: "2026-01-01T10:00:00Z")
    monkeypatch.setattr(watchdog_worker, "own_node_id", lambda head: "0")
    drained = SimpleNamespace(returncode=0, stdout="done")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: drained)
    with pytest.raises(Over):
        watchdog_worker.watch("10.0.0.1")
    assert (tmp_path / "lease").exists()
    assert "AWS takes" in full.done[0]


def test_gpus_are_watched_on_a_full_disk(full: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_use, "FILE", Path("/dev/full"))
    monkeypatch.setattr(gpu_use, "sample", lambda: ["2026-01-01T10:00:00,0,1,1,2"])
    with pytest.raises(Over):
        gpu_use.record()


def test_logs_are_shipped_and_one_notice_is_sent_when_the_disk_is_full(
    full: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_shipping, "SESSION", Path("/nonexistent"))
    calls: list[float] = []

    def sleep(seconds: float) -> None:
        calls.append(seconds)
        if len(calls) == 3:
            raise Over

    monkeypatch.setattr(time, "sleep", in_this_thread(sleep))
    with pytest.raises(Over):
        log_shipping.ship_forever("worker")
    (notice,) = full.done
    assert "GB free on the disk with" in notice
