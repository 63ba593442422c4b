"""Test the boards' form, and the errors of `inv metrics`. test_local_target.py collects metrics with Prometheus."""

import json
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import dashboards
import pytest
import ray

from raymill import prometheus, settings
from raymill.errors import UserError
from raymill.target import Connection

BOARDS = sorted(path.stem for path in (settings.PROJECT / "raymill" / "dashboards").iterdir())
CONNECTION = Connection(dashboard="http://127.0.0.1:9", headers={"Authorization": "Bearer t"}, job_variables={})


@pytest.mark.parametrize("board", BOARDS)
def test_each_panel_has_its_own_place_and_queries(board: str) -> None:
    content = json.loads((settings.PROJECT / "raymill" / "dashboards" / f"{board}.json").read_text(encoding="utf-8"))
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in content["panels"]}
    assert len(places) == len(content["panels"]) == len({panel["title"] for panel in content["panels"]})
    assert all(target["expr"] for panel in content["panels"] for target in panel["targets"])


@pytest.mark.parametrize("board", BOARDS)
def test_ray_exports_the_gpu_metrics_of_the_boards(board: str) -> None:
    """There is no GPU here, so this reads their names in the code of Ray's agent, which exports them."""
    agent = Path(ray.__file__).parent / "dashboard" / "modules" / "reporter" / "reporter_agent.py"
    names = set(re.findall(r'"(node_\w+)": Gauge', agent.read_text(encoding="utf-8")))
    gpu = {name for name in dashboards.shown(board) if "gpu" in name or "gram" in name}
    assert len(gpu) == 2
    assert {name.removeprefix("ray_") for name in gpu} <= names


def test_without_prometheus_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"not installed: prometheus\. Run: sudo apt-get"):
        prometheus.run(CONNECTION)


def test_a_second_prometheus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: "/usr/bin/false")
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(prometheus, "PORT", other.getsockname()[1])
        with pytest.raises(UserError, match="is in use"):
            prometheus.run(CONNECTION)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the handlers of signals afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_prometheus_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: "/usr/bin/false")
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    with pytest.raises(UserError, match="Prometheus ended with exit code 1"):
        prometheus.run(CONNECTION)
