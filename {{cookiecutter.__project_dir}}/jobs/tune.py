"""Searches settings of a fine-tuning: short runs of the same job, the worse of which Ray Tune ends early (ASHA).

Each trial is a run in the search's folder, and resumes as every run does. Tune only decides which goes on: it stores
nothing. Tune's own way to resume forgets what the trials so far have set as the mark for those to come; here a new
start shows it to the scheduler again.
"""

from pipeline.ray_support import cli
from pipeline.tuning.options import TuneOptions

if __name__ == "__main__":
    cli.parse(TuneOptions, "train", "tune")  # before the imports below, which take seconds

import logging
import math
import os
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from rich.console import Console

import settings
from jobs import finetune_ddp, finetune_deepspeed, finetune_fsdp
from pipeline.ray_support import capacity, gang
from pipeline.training import preflight
from pipeline.training.dataset import read_manifest
from pipeline.training.options import DDPOptions, DeepSpeedOptions, FSDPOptions, TrainOptions
from pipeline.training.schedule import check_batches
from pipeline.tuning import trials as records
from pipeline.tuning.trials import Trial
from settings import UserError

CONSOLE = Console(highlight=False, width=120)


class Script(NamedTuple):
    """A job that a trial can run."""

    main: Callable[[Any], None]
    options: type[TrainOptions]
    sections: tuple[str, ...]


SCRIPTS = {
    "finetune_ddp": Script(finetune_ddp.main, DDPOptions, ("train",)),
    "finetune_fsdp": Script(finetune_fsdp.main, FSDPOptions, ("train", "fsdp")),
    "finetune_deepspeed": Script(finetune_deepspeed.main, DeepSpeedOptions, ("train", "deepspeed")),
}


def main(options: TuneOptions) -> None:
    """Search the learning rate, batch and LoRA rank with which a fine-tuning evaluates best."""
    options = preflight.with_absolute_paths(options)
    identity = _check(options)
    cli.connect(log_to_driver=False)  # a line for each trial is enough
    _check_cluster(options)
    preflight.claim(options, identity)
    trials = records.load(options.folder, draw(options))
    failures = search(options, trials)
    _show(options, trials)
    if failures:
        raise UserError(
            f"{len(failures)} of {len(trials)} trials failed ({failures[0]}); mend it, then run the same command again "
            "to go on with them."
        )


def _check(options: TuneOptions) -> preflight.Identity:
    """Refuse what no trial could run; returns what makes a search the same search, which the number of trials is no
    part of."""
    if options.stream:
        raise UserError("trials read preprocessed rows: leave --stream out, and run preprocess first.")
    for rows in options.global_batches or (options.global_batch_rows,):
        check_batches(rows, options.micro_batch_rows, options.min_workers, options.max_workers)
    identity = preflight.check_packed(options)
    if not read_manifest(options.data).eval.rows:
        raise UserError(f"{options.data} holds nothing to evaluate on; run preprocess with a larger --eval-share.")
    rates = options.learning_rates
    return identity | {
        "learning_rate": [rates.low, rates.high],
        "global_batch_rows": list(options.global_batches) or options.global_batch_rows,
        "lora_rank": list(options.lora_ranks) or options.lora_rank,
    }


def _check_cluster(options: TuneOptions) -> None:
    room, each = capacity.room(options.worker_resources), options.min_workers
    if options.trials_at_once * each > room:
        raise UserError(
            f"trials_at_once = {options.trials_at_once}, with {each} workers for each, is more than the {room} workers "
            "that this cluster can ever hold; "
            + (f"use --trials-at-once {room // each}." if room >= each else "use a smaller --num-workers.")
        )
    paths = {"model": options.model, "data": options.data, "output": options.output}
    capacity.refuse_private_paths(paths, options.shared_paths, "train")


def draw(options: TuneOptions) -> list[dict[str, float]]:
    """The settings of each trial, by their names in [train]; more trials begin with the same."""
    generator = random.Random(options.seed)
    low, high = math.log(options.learning_rates.low), math.log(options.learning_rates.high)
    choices = {"global_batch_rows": options.global_batches, "lora_rank": options.lora_ranks}
    return [
        {"learning_rate": float(f"{math.exp(generator.uniform(low, high)):.3g}")}
        | {key: generator.choice(values) for key, values in choices.items() if values}
        for _ in range(options.trials)
    ]


def search(options: TuneOptions, trials: Sequence[Trial]) -> list[str]:
    """Run the trials that have not ended; returns why some failed."""
    left = [trial.name for trial in trials if not trial.ended]
    print(
        f"{options.name}: {len(trials)} trials of {options.script}, {options.trials_at_once} at once, {options.steps} "
        f"steps at most; {len(trials) - len(left)} have ended already",
        flush=True,
    )
    if not left:
        return []
    os.environ |= {
        "RAY_AIR_NEW_OUTPUT": "0",  # the older way to report can be silent
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # each run has its own files
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a user error comes without a loss
    }
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the files of its own that nobody reads
    zone = gang.find_zone(options)
    runs = {trial.name: run_options(options, trial) for trial in trials}
    note = Note(options.folder, options.steps, trials)
    with tempfile.TemporaryDirectory() as scratch:
        tune.Tuner(
            tune.with_resources(
                tune.with_parameters(_run, main=SCRIPTS[options.script].main, runs=runs, zone=zone),
                {"node:__internal_head__": 0.001},  # what starts the workers is where this job is, and takes no CPU
            ),
            param_space={"trial": tune.grid_search(left)},
            tune_config=tune.TuneConfig(
                scheduler=scheduler(options, trials), max_concurrent_trials=options.trials_at_once
            ),
            run_config=tune.RunConfig(storage_path=scratch, verbose=0, callbacks=[note]),
        ).fit()
    return note.failures


def scheduler(options: TuneOptions, trials: Sequence[Trial]) -> ASHAScheduler:
    """ASHA, with what the trials that have ended came to."""
    asha = ASHAScheduler(
        time_attr="step",
        metric="eval_loss",
        mode="min",
        grace_period=options.grace_steps,
        reduction_factor=options.reduction_factor,
        max_t=options.steps - 1,  # at the last step there is nothing left to save
        stop_last_trials=False,
    )
    for trial in trials:
        if trial.ended:
            stand_in = SimpleNamespace(trial_id=trial.name)
            asha.on_trial_add(None, stand_in)
            for line in records.curve(options.folder, trial.name):
                asha.on_trial_result(None, stand_in, line)
    return asha


def run_options(options: TuneOptions, trial: Trial) -> TrainOptions:
    """Tune hears of an evaluation when its checkpoint is kept."""
    script = SCRIPTS[options.script]
    own = {"name": trial.name, "output": options.folder, "fresh": False, "checkpoint_every": options.eval_every}
    shared = options.model_dump(include=set(TrainOptions.model_fields))
    return script.options.model_validate(
        settings.load(script.options, *script.sections).model_dump() | shared | trial.settings | own
    )


def _run(
    config: dict[str, str], main: Callable[[Any], None], runs: dict[str, TrainOptions], zone: dict[str, str] | None
) -> dict[str, str] | None:
    """What Tune runs for a trial: its job."""
    options = runs[config["trial"]]
    os.environ |= {"GANG_ZONE": zone["zone"]} if zone else {}
    for line in records.curve(options.output, options.name):  # an earlier start's
        tune.report(line)
    try:
        main(options)
    except UserError as error:
        return {"user_error": str(error)}
    return None


class Note(tune.Callback):
    """Notes how a trial ended, and says it in a line."""

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
        outcome = records.Outcome(ours, records.curve(self._folder, ours.name))
        stopped = f"stopped at step {step}"  # its workers may have gone a few further
        ours.ended = diverged[0] if diverged else stopped if step < self._steps else "all steps"
        records.save(self._folder, list(self._trials.values()))
        loss = f"evaluation loss {outcome.loss:.4f} after {outcome.steps} steps, " if outcome.curve else ""
        self._say(ours, loss + ours.ended)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._fail(self._trials[trial.config["trial"]], "its traceback is above")

    def _fail(self, trial: Trial, reason: str) -> None:
        self.failures.append(f"{trial.name}: {reason}")
        self._say(trial, f"failed: {reason}")

    def _say(self, trial: Trial, what: str) -> None:
        ended = sum(bool(one.ended) for one in self._trials.values())
        print(f"{trial.name}: {trial.described()}: {what}; {ended} of {len(self._trials)} have ended", flush=True)


def _show(options: TuneOptions, trials: Sequence[Trial]) -> None:
    outcomes = records.ranked(options.folder, trials)
    CONSOLE.print(records.table(outcomes))
    if outcomes[0].curve:
        print(f"curves: {records.plot(options.folder, outcomes)}")
        print(f"the best of them, for settings.toml:\n{records.snippet(outcomes[0].trial, settings.active_profile())}")
    records.delete_weights(options.folder, trials)


if __name__ == "__main__":
    cli.run(main)
