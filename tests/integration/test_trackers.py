"""Test that MLflow and Weights & Biases get all metrics of a resumed run, and that their failures do not stop it."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from raymill import settings
from raymill.training.options import DDPOptions
from raymill.training.storage import RunFolder
from raymill.training.trackers import EXPERIMENT, Trackers

ROWS = [{"step": float(step), "loss": 3.0 / step} for step in range(1, 7)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path / "run"))


def _options(**changes: str) -> DDPOptions:
    return settings.load(DDPOptions, "train", profile="local").model_copy(update={"name": "mine", **changes})


def test_mlflow_has_each_step_of_a_resumed_run(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlflow").as_uri()
    for rows in (ROWS[:4], ROWS[2:]):  # the second start repeats two steps
        trackers = Trackers(_options(mlflow=uri), folder)
        trackers.write(rows)
        trackers.end()
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "mine"
    assert run.data.params["learning_rate"] == str(_options().learning_rate)
    history = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}
    assert history == {int(row["step"]): row["loss"] for row in ROWS}


def test_wandb_has_one_run_with_the_metrics_of_both_starts(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for rows in (ROWS[:4], ROWS[4:]):
        trackers = Trackers(_options(wandb="project"), folder)
        trackers.write(rows)
        trackers.end()
    run_id = json.loads((folder.path / "trackers.json").read_text())["wandb"]
    written = list((folder.path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(written) == 2  # one run, with one file for each start
    deadline = time.monotonic() + 10  # after finish() has returned, wandb's own process still writes the end of a file
    while not all(b"loss" in file.read_bytes() for file in written):
        assert time.monotonic() < deadline, [file.stat().st_size for file in written]
        time.sleep(0.1)


def test_a_tracker_that_fails_gets_no_more_metrics(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(400)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        trackers = Trackers(_options(mlflow=f"http://127.0.0.1:{server.server_port}"), folder)
        trackers.write(ROWS)
        trackers.end()
        server.shutdown()
    assert capsys.readouterr().out.count("mlflow failed and gets no more metrics") == 1


def test_without_settings_there_is_no_tracker(folder: RunFolder) -> None:
    trackers = Trackers(_options(), folder)
    trackers.write(ROWS)
    trackers.end()
    assert not list(folder.path.iterdir())
