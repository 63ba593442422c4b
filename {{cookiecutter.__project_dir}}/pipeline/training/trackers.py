"""Sends a run's numbers on to MLflow and Weights & Biases, where [train] names one; a resumed run goes on there too."""

import json
import os
import time
from collections.abc import Callable
from typing import Protocol

from pipeline.training.options import TrainOptions
from pipeline.training.runtimes.runtime import Metrics
from pipeline.training.storage import RunFolder

EXPERIMENT = "fine-tuning"
"""MLflow's name for what holds the runs."""


class Tracker(Protocol):
    """One of them."""

    run_id: str
    """By which a resumed run is found again."""

    def write(self, rows: list[Metrics]) -> None:
        """Send the numbers of steps, some of them perhaps for the second time."""
        ...

    def end(self) -> None:
        """Send what is still here."""
        ...


class Trackers:
    """Those that [train] names. One that fails is left out from then on, as a training is worth more than its curve."""

    def __init__(self, options: TrainOptions, folder: RunFolder) -> None:
        makers: dict[str, Callable[[str | None], Tracker]] = {}
        if options.mlflow:
            makers["mlflow"] = lambda run_id: MLflow(options, run_id)
        if options.wandb:
            makers["wandb"] = lambda run_id: WandB(options, run_id, folder)
        file = folder.fetch("trackers.json")
        begun = json.loads(file.read_text()) if file.exists() else {}
        self._trackers: dict[str, Tracker] = {}
        for name, make in makers.items():
            self._try(name, lambda name=name, make=make: self._trackers.update({name: make(begun.get(name))}))
        if self._trackers:
            file.write_text(json.dumps(begun | {name: tracker.run_id for name, tracker in self._trackers.items()}))

    def write(self, rows: list[Metrics]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, lambda tracker=tracker: tracker.write(rows))

    def end(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, tracker.end)

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a server or its library meets
            self._trackers.pop(name, None)
            print(f"{name} gets no more numbers of this start ({error}); metrics.jsonl has them all", flush=True)


class MLflow:
    """A run on the server, or in the folder, at a tracking URI."""

    def __init__(self, options: TrainOptions, run_id: str | None) -> None:
        # all ranks wait for its answer; by itself it would try for twenty minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient, entities  # seconds, for those who asked for it

        self._metric = entities.Metric
        self._client = MlflowClient(options.mlflow)
        self.run_id = run_id or self._begin(options)

    def _begin(self, options: TrainOptions) -> str:
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
    """A run of a Weights & Biases project; the key is the secret WANDB_API_KEY."""

    def __init__(self, options: TrainOptions, run_id: str | None, folder: RunFolder) -> None:
        import wandb  # seconds, for those who asked for it

        self._run = wandb.init(
            project=options.wandb,
            name=options.name,
            id=run_id,
            resume="allow",
            config=options.model_dump(),
            dir=folder.path,
            settings=wandb.Settings(console="off", silent=True),  # the job's own log holds what it prints
        )
        self.run_id = self._run.id

    def write(self, rows: list[Metrics]) -> None:
        for row in rows:
            self._run.log(row, step=int(row["step"]))

    def end(self) -> None:
        self._run.finish()
