"""Runs the trials of a search under Ray Tune.

Each trial is a training run in the search's folder, and resumes like any other run. Tune only decides which trials
continue, and stores nothing. Tune's own way to resume a search is not used, because its scheduler would forget the
results of earlier trials. Whenever a search starts, it passes these results to a new scheduler.
"""

import json
import logging
import math
import os
import random
import re
import tempfile
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from raymill import code_identity, job
from raymill.errors import UserError
from raymill.job_context import JobContext
from raymill.ray_support import capacity, gang
from raymill.training import launch, preflight
from raymill.training.dataset import read_manifest
from raymill.training.objectives import Objective
from raymill.training.options import TrainOptions
from raymill.training.schedule import check_batches
from raymill.training.strategy import MakeStrategy
from raymill.tuning import trials as trial_store
from raymill.tuning.options import TuneOptions
from raymill.tuning.trials import Trial


def check(options: TuneOptions) -> preflight.Identity:
    """Refuse a search whose trials could not run. Return its identity, which does not include the number of trials."""
    if options.stream:
        raise UserError("tune reads preprocessed rows. Leave out --stream, and run preprocess first.")
    for rows in options.global_batches or (options.global_batch_rows,):
        check_batches(rows, options.micro_batch_rows, options.min_workers, options.max_workers)
    identity = preflight.check_packed(options, _objective(options))
    if not read_manifest(options.data).eval.rows:
        raise UserError(f"{options.data} has no evaluation rows. Run preprocess with a larger --eval-share.")
    rates = options.learning_rates
    code = code_identity.identify(_script(options).STRATEGY)
    return (
        identity
        | code
        | {
            "learning_rate": [rates.low, rates.high],
            "global_batch_rows": list(options.global_batches) or options.global_batch_rows,
            "lora_rank": list(options.lora_ranks) or options.lora_rank,
        }
    )


def check_cluster(options: TuneOptions) -> None:
    """Refuse more simultaneous trials than the cluster can hold, and paths that only one node can read."""
    limit, each = capacity.max_workers(options.worker_resources), options.min_workers
    if options.trials_at_once * each > limit:
        raise UserError(
            f"trials_at_once = {options.trials_at_once} needs {options.trials_at_once * each} workers, but this "
            f"cluster can hold only {limit}; "
            + (f"use --trials-at-once {limit // each}." if limit >= each else "use a smaller --num-workers.")
        )
    paths = {"model": options.model, "data": options.data, "output": options.output}
    capacity.refuse_private_paths(paths, options.shared_paths, "train")


def draw(options: TuneOptions) -> list[dict[str, float]]:
    """Draw the settings of each trial, keyed by their names in [train]. Adding trials does not change earlier ones."""
    generator = random.Random(options.seed)
    low, high = math.log(options.learning_rates.low), math.log(options.learning_rates.high)
    choices = {"global_batch_rows": options.global_batches, "lora_rank": options.lora_ranks}
    return [
        {"learning_rate": float(f"{math.exp(generator.uniform(low, high)):.3g}")}
        | {key: generator.choice(values) for key, values in choices.items() if values}
        for _ in range(options.trials)
    ]


def run(options: TuneOptions, trials: Sequence[Trial]) -> list[str]:
    """Run the trials that have not ended. Return an error message for each trial that failed."""
    remaining = [trial.name for trial in trials if not trial.ended]
    print(
        f"{options.name}: {len(trials)} trials of {options.script}, {options.trials_at_once} at once, at most "
        f"{options.steps} steps; {len(trials) - len(remaining)} have already ended",
        flush=True,
    )
    if not remaining:
        return []
    os.environ |= {
        "RAY_AIR_NEW_OUTPUT": "0",  # only Ray's older output can be silenced
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # each run writes its own files
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial that returns a user error has no loss
    }
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # Tune warns about files that this project does not use
    zone = gang.find_zone(options)
    runs = {trial.name: run_options(options, trial) for trial in trials}
    recorder = TrialRecorder(options.folder, options.steps, trials)
    with tempfile.TemporaryDirectory() as scratch:
        tune.Tuner(
            tune.with_resources(
                tune.with_parameters(_run_trial, strategy=_script(options).STRATEGY, runs=runs, zone=zone),
                {"node:__internal_head__": 0.001},  # a trial's driver runs on the head and needs no CPU
            ),
            param_space={"trial": tune.grid_search(remaining)},
            tune_config=tune.TuneConfig(
                scheduler=scheduler(options, trials), max_concurrent_trials=options.trials_at_once
            ),
            run_config=tune.RunConfig(storage_path=scratch, verbose=0, callbacks=[recorder]),
        ).fit()
    return recorder.failures


def scheduler(options: TuneOptions, trials: Sequence[Trial]) -> ASHAScheduler:
    """Return an ASHA scheduler that knows the results of the trials that have ended."""
    ranking = _objective(options).ranking
    asha = ASHAScheduler(
        time_attr="step",
        metric=ranking.metric,
        mode=ranking.mode,
        grace_period=options.grace_steps,
        reduction_factor=options.reduction_factor,
        max_t=options.steps - 1,  # stopping a trial at its last step would save nothing
        stop_last_trials=False,
    )
    for trial in trials:
        if trial.ended:
            stand_in = SimpleNamespace(trial_id=trial.name)
            asha.on_trial_add(None, stand_in)
            for line in trial_store.outcome(options.folder, trial).curve:
                asha.on_trial_result(None, stand_in, line)
    return asha


def run_options(options: TuneOptions, trial: Trial) -> TrainOptions:
    """Return the options of a trial's run.

    Each evaluation also saves a checkpoint, because the trainer reports metrics to Tune only with a checkpoint.
    """
    script = _script(options)
    own = {"name": trial.name, "output": options.folder, "fresh": False, "checkpoint_every": options.eval_every}
    shared = options.model_dump(include=set(TrainOptions.model_fields))
    return script.JOB.options_type.model_validate(script.JOB.load().model_dump() | shared | trial.settings | own)


def _script(options: TuneOptions) -> ModuleType:
    """Return the script of the job that each trial runs."""
    script = job.load(options.script)
    if not hasattr(script, "STRATEGY"):
        raise UserError(f"tune cannot run {options.script}. Set script in [tune] to a job like finetune_ddp.")
    return script


def _objective(options: TuneOptions) -> Objective:
    return _script(options).STRATEGY.make_objective(options)


def _run_trial(
    config: dict[str, str], strategy: MakeStrategy, runs: dict[str, TrainOptions], zone: dict[str, str] | None
) -> dict[str, str] | None:
    """Run a trial. Tune calls this function. Return a user error instead of raising it."""
    options = runs[config["trial"]]
    os.environ |= JobContext(gang_selector=json.dumps(zone) if zone else None).variables()
    earlier = trial_store.outcome(options.output, Trial(options.name, {}))
    for line in earlier.curve:  # evaluations before a restart
        tune.report(line)
    try:
        launch.fit(options, strategy)
    except UserError as error:
        return {"user_error": str(error)}
    return None


class TrialRecorder(tune.Callback):
    """Prints how each trial ended, and saves the result unless the trial failed."""

    def __init__(self, folder: str, steps: int, trials: Sequence[Trial]) -> None:
        self.failures: list[str] = []
        self._folder = folder
        self._steps = steps
        self._trials = {trial.name: trial for trial in trials}

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        ours = self._trials[trial.config["trial"]]
        message, step = (trial.last_result.get(key, default) for key, default in (("user_error", ""), ("step", 0)))
        diverged = re.match(r"step \d+ diverged", message)
        if message and not diverged:
            self._fail(ours, message)
            return
        outcome = trial_store.outcome(self._folder, ours)
        stopped = f"stopped at step {step}"  # its workers may have done a few more steps
        ours.ended = diverged[0] if diverged else stopped if step < self._steps else "all steps"
        trial_store.save(self._folder, list(self._trials.values()))
        best = f"{outcome.ranking.title} {outcome.best} after {outcome.steps} steps, " if outcome.curve else ""
        self._print(ours, best + ours.ended)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._fail(self._trials[trial.config["trial"]], "its traceback is above")

    def _fail(self, trial: Trial, reason: str) -> None:
        self.failures.append(f"{trial.name}: {reason}")
        self._print(trial, f"failed: {reason}")

    def _print(self, trial: Trial, result: str) -> None:
        ended = sum(bool(trial.ended) for trial in self._trials.values())
        print(f"{trial.name}: {trial.description()}: {result}; {ended} of {len(self._trials)} have ended", flush=True)
