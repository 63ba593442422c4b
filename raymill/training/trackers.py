"""Sends metrics to MLflow and Weights & Biases, if [train] names them. A resumed run also resumes in the tracker."""

import json
import os
import time
from collections.abc import Callable
from typing import Protocol

from raymill import state_files
from raymill.training.options import TrainOptions
from raymill.training.runtimes.runtime import Metrics
from raymill.training.storage import RunFolder

EXPERIMENT = "fine-tuning"
"""Name of the MLflow experiment."""


class Tracker(Protocol):
    """A run in an experiment tracker."""

    run_id: str
    """The tracker's id of the run, which is needed to resume it."""

    def write(self, rows: list[Metrics]) -> None:
        """Send the metrics of some steps. A resumed run sends repeated steps a second time."""
        ...

    def end(self) -> None:
        """Send the remaining metrics, and mark the run as finished."""
        ...


class Trackers:
    """The trackers that [train] names. A tracker that fails is dropped, so that it cannot stop the training."""

    def __init__(self, options: TrainOptions, folder: RunFolder) -> None:
        makers: dict[str, Callable[[str | None], Tracker]] = {}
        if options.mlflow:
            makers["mlflow"] = lambda run_id: MLflow(options, run_id)
        if options.wandb:
            makers["wandb"] = lambda run_id: WandB(options, run_id, folder)
        file = folder.fetch("trackers.json")
        saved = state_files.parse(file.read_bytes(), dict[str, str]) if file.exists() else {}
        if saved is None and makers:
            print(f"{file} is damaged, so this run appears as a new one in {' and '.join(makers)}", flush=True)
        saved = saved or {}
        self._trackers: dict[str, Tracker] = {}
        for name, make in makers.items():
            self._try(name, lambda name=name, make=make: self._trackers.update({name: make(saved.get(name))}))
        if self._trackers:
            file.write_text(json.dumps(saved | {name: tracker.run_id for name, tracker in self._trackers.items()}))

    def write(self, rows: list[Metrics]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, lambda tracker=tracker: tracker.write(rows))

    def end(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, tracker.end)

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # servers and libraries may raise any error
            self._trackers.pop(name, None)
            print(
                f"{name} failed and gets no more metrics until a restart ({error}); metrics.jsonl has all metrics",
                flush=True,
            )


class MLflow:
    """A run in MLflow. The tracking URI is that of a server or a folder."""

    def __init__(self, options: TrainOptions, run_id: str | None) -> None:
        # all ranks wait for MLflow's answer, and by default its client retries for twenty minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient, entities  # imported late: it takes seconds

        self._metric = entities.Metric
        self._client = MlflowClient(options.mlflow)
        self.run_id = run_id or self._create_run(options)

    def _create_run(self, options: TrainOptions) -> str:
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(EXPERIMENT)
        run_id = self._client.create_run(number, run_name=options.name).info.run_id
        for name, value in options.model_dump().items():
            self._client.log_param(run_id, name, value)
        return run_id

    def write(self, rows: list[Metrics]) -> None:
        now = int(1000 * time.time())
        metrics = [
            self._metric(name, value, now, int(row["step"]))
            for row in rows
            for name, value in row.items()
            if name != "step"
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def end(self) -> None:
        self._client.set_terminated(self.run_id)


class WandB:
    """A run in a Weights & Biases project. The API key is the secret WANDB_API_KEY."""

    def __init__(self, options: TrainOptions, run_id: str | None, folder: RunFolder) -> None:
        import wandb  # imported late: it takes seconds

        self._run = wandb.init(
            project=options.wandb,
            name=options.name,
            id=run_id,
            resume="allow",
            config=options.model_dump(),
            dir=folder.path,
            settings=wandb.Settings(console="off", silent=True),  # the output is already in the job's log
        )
        self.run_id = self._run.id

    def write(self, rows: list[Metrics]) -> None:
        for row in rows:
            self._run.log(row, step=int(row["step"]))

    def end(self) -> None:
        self._run.finish()
