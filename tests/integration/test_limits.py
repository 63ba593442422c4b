"""Test `inv limits`: it changes the limits under a running watchdog, and asks before the cluster can cost more."""

import datetime
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from raymill import settings
from raymill.aws import limits as aws_limits
from raymill.common import cluster_file, limits, prices
from raymill.common.limits import LimitsSection
from raymill.errors import UserError
from raymill.node import activity

FILE = cluster_file.load()
LAUNCHED = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
LIMITS = LimitsSection(hours=24, dollars=500, idle_hours=3)
USED = aws_limits.Usage(limits=LIMITS, hours=5, dollars=40, dollars_per_hour=8, idle_hours=2)
WATCHDOG = """
from pathlib import Path
from raymill.common import instances
from raymill.node import autoscaler_log, watchdog_head
home = Path.home()
autoscaler_log.LOGS = home
watchdog_head.LEASE, watchdog_head.LAUNCHED, watchdog_head.INTERVAL_S = home / "lease", home / "launched", 0.1
watchdog_head.write_limits = lambda max_workers: None
watchdog_head.end_cluster = lambda file, reason: (home / "ended").write_text(reason)
instances.living = instances.failed_launches = lambda file: []
watchdog_head.watch()
"""


METRICS = """\
# TYPE ray_serve_num_http_requests_total counter
ray_serve_num_http_requests_total{application="model",method="POST",route="/",status_code="200",SessionName="s"} 3.0
ray_serve_num_http_requests_total{application="rag",method="POST",route="/rag",status_code="500",SessionName="s"} 1.0
ray_serve_num_http_requests_total{application="model",method="GET",route="/",status_code="200",SessionName="s"} 70.0
ray_serve_num_http_error_requests_total{application="rag",method="POST",route="/rag",error_code="500"} 1.0
"""


class Head:
    """A folder in which a real watchdog runs, with the files that cluster.yaml copies to a head. AWS is left out."""

    instance_id = "i-0"

    def __init__(self, home: Path) -> None:
        self.home = home
        for target, source in FILE.content["file_mounts"].items():
            copy = home / target.removeprefix("~/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if Path(source).is_dir() else shutil.copy)(settings.PROJECT / source, copy)
        (home / "launched").touch()
        self._variables = os.environ | {"HOME": str(home), "PYTHONPATH": ""}
        command = [sys.executable, "-c", WATCHDOG]
        self.watchdog = subprocess.Popen(command, cwd=home / "project", env=self._variables)
        while not self._state_file.exists():
            assert self.watchdog.poll() is None
            time.sleep(0.1)

    @property
    def _state_file(self) -> Path:
        return self.home / "watchdog.json"

    def run(self, command: str, text: str = "") -> str:
        return subprocess.run(
            ["bash", "-c", command], env=self._variables, input=text, capture_output=True, text=True, check=True
        ).stdout

    def state(self) -> dict[str, Any]:
        return json.loads(self._state_file.read_text())

    def set_age(self, hours: float) -> None:
        """Let the cluster be this old, and wait until the watchdog knows."""
        then = time.time() - hours * 3600
        os.utime(self.home / "launched", (then, then))
        while self.state()["hours"] < hours:
            time.sleep(0.1)


@pytest.fixture
def guarded() -> list[Any]:
    """Return the moves of the guard."""
    return []


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: list[Any]) -> Iterator[Head]:
    copy = Path(shutil.copy(settings.FILE, tmp_path))
    monkeypatch.setattr(settings, "FILE", copy)
    monkeypatch.setattr(settings.load, "__kwdefaults__", {"profile": None, "file": copy})
    monkeypatch.setattr(aws_limits.instances, "head", lambda file: SimpleNamespace(launched=LAUNCHED))
    monkeypatch.setattr(aws_limits.guard, "move", lambda *moved: guarded.append(moved))
    monkeypatch.setattr(prices, "ask", lambda file: prices.Prices(0.4, {}, 10.0))
    set_limits(LIMITS)
    made = Head(tmp_path / "home")
    monkeypatch.setattr(aws_limits.ssh, "find_head", lambda file: made)
    monkeypatch.setattr(aws_limits.head, "read_status", lambda head: {"watchdog": head.state() | {"runs": True}})
    made.run(f"cp {copy} {aws_limits.COPY_ON_HEAD}")
    yield made
    made.watchdog.kill()
    made.watchdog.wait()


def set_limits(wanted: LimitsSection) -> None:
    aws_limits.settings_file.write({"cluster.limits": wanted.model_dump()}, settings.FILE)


def test_the_limits_change_while_the_watchdog_runs(
    head: Head, guarded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = settings.FILE.read_text()
    aws_limits.change(FILE, {"hours": "48", "dollars": "900"}, yes=True)
    assert head.state()["limits"] == {"hours": 48, "dollars": 900, "idle_hours": 3}
    assert head.watchdog.poll() is None
    assert guarded == [(FILE, LAUNCHED, 48)]
    shown = capsys.readouterr().out
    assert "from 24 hours, 500 dollars and 3 idle hours to 48 hours, 900 dollars and 3 idle hours" in shown
    # 48 hours at the highest price; on a busy machine, the watchdog counts the first cents by then
    assert re.search(r"costs at most 480\.0\d dollars, of which 0\.0\d are spent", shown)
    assert limits.load() == LIMITS.model_copy(update={"hours": 48, "dollars": 900})
    changed = [line for line in settings.FILE.read_text().splitlines() if line not in before.splitlines()]
    assert [line.partition("#")[0].split() for line in changed] == [["hours", "=", "48"], ["dollars", "=", "900"]]
    head.set_age(hours=25)
    aws_limits.show(FILE, Console(width=150))
    assert "48 25.0 23.0 until" in " ".join(capsys.readouterr().out.split())
    assert not (head.home / "ended").exists()
    head.set_age(hours=48)
    while not (head.home / "ended").exists():
        time.sleep(0.1)
    assert (head.home / "ended").read_text() == "the limit of 48 hours in settings.toml is reached"


def test_a_higher_limit_needs_consent_and_a_lower_one_does_not(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(UserError, match="Run: inv limits --target aws --hours 30 --yes"):
        aws_limits.change(FILE, {"hours": "30"}, yes=False)
    assert limits.load() == LIMITS
    aws_limits.change(FILE, {"hours": "12", "idle_hours": "0"}, yes=False)
    assert head.state()["limits"] == {"hours": 12, "dollars": 500, "idle_hours": 0}


def test_up_gives_a_running_cluster_the_limits_in_settings(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    aws_limits.follow_settings(FILE, yes=False)  # nothing has changed, so it asks nothing
    set_limits(LIMITS.model_copy(update={"dollars": 900}))
    with pytest.raises(UserError, match="Run: inv up --target aws --yes"):
        aws_limits.follow_settings(FILE, yes=False)
    aws_limits.follow_settings(FILE, yes=True)
    assert head.state()["limits"] == {"hours": 24, "dollars": 900, "idle_hours": 3}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hours": "two"}, "--hours is 'two'. Input should be a valid number"),
        ({"dollars": "-1"}, "--dollars is '-1'. Input should be greater than 0"),
        ({"dollars": "inf"}, "--dollars is 'inf'. Input should be a finite number"),
        ({"hours": "9000"}, "--hours is '9000'. Input should be less than or equal to 8760"),
        ({"idle_hours": "-2"}, "--idle-hours is '-2'. Input should be greater than or equal to 0"),
        ({"hours": "4"}, "the cluster has used 5.00 hours, so a limit of 4 would end it and all jobs now"),
        ({"idle_hours": "1"}, "the cluster has used 2.00 idle hours, so a limit of 1 would end it and all jobs now"),
    ],
)
def test_a_limit_that_makes_no_sense_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], error: str
) -> None:
    monkeypatch.setattr(aws_limits.ssh, "find_head", lambda file: None)
    monkeypatch.setattr(aws_limits, "_read", lambda head: USED)
    with pytest.raises(UserError) as raised:
        aws_limits.change(FILE, options, yes=True)
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize(
    ("wanted", "most"),
    [((24, 500), 230), ((24, 200), 200), ((5, 500), 40)],
)
def test_the_most_that_a_cluster_can_cost(wanted: tuple[float, float], most: float) -> None:
    assert USED.most_dollars(LimitsSection(hours=wanted[0], dollars=wanted[1]), 10) == most


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve METRICS on loopback, as a node's agent does, and write the file that names the agents."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        targets = [f"127.0.0.1:{server.server_port}", "192.0.2.1:1"]  # the other one is a worker, which is not asked
        (tmp_path / "targets.json").write_text(json.dumps([{"labels": {"job": "ray"}, "targets": targets}]))
        monkeypatch.setattr(activity, "TARGETS", tmp_path / "targets.json")
        yield
        server.shutdown()


def test_post_requests_of_all_applications_are_counted(metrics: None) -> None:
    assert activity.count_requests() == 4.0
