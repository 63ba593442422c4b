"""The training loop, which is the same for every strategy and runtime."""

import os
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from raymill.data.tokenizer import load_tokenizer
from raymill.errors import UserError
from raymill.training import (
    checkpoints,
    composite,
    cuda_allocator,
    failures,
    held_out,
    model_io,
    optimizers,
    parameters,
    reference,
    weights_check,
)
from raymill.training.collectives import any_rank, largest, total
from raymill.training.dataset import Batch, PackedRows
from raymill.training.meter import Diverged, Meter
from raymill.training.metric_logger import MetricLogger
from raymill.training.options import TrainOptions
from raymill.training.ranking import WORST, Best
from raymill.training.runtimes.runtime import SCORE, Metrics, Runtime
from raymill.training.schedule import spread
from raymill.training.storage import RunFolder
from raymill.training.strategy import MakeStrategy, Strategy
from raymill.training.training_rows import PackedSource, TrainingRows

MAX_ROWS_LISTED = 8
# Approximate maximum time between two progress lines. At each line, the trainer also checks for spot notices, which AWS
# sends only two minutes before it stops a machine.
PROGRESS_INTERVAL_S = 10


def train(
    options: TrainOptions, runtime: Runtime, make_strategy: MakeStrategy, stream: TrainingRows | None = None
) -> None:
    """Train up to `options.last_step`, from the run's last checkpoint or from the base model, and export the model.

    With `patience`, training may stop earlier, and the best checkpoint is exported.

    Args:
        options: the options, with absolute paths or URIs.
        stream: the training rows. None: the packed rows in `options.data`.

    Raises:
        UserError: training failed. All ranks raise it, so that no rank waits for one that failed.
    """
    os.environ["DS_ACCELERATOR"] = runtime.device.type  # transformers imports deepspeed, which reads this variable
    torch.set_num_threads(min(options.cpus_per_worker, os.cpu_count() or 1))  # the machine may have fewer CPUs
    Trainer(model_io.with_supported_precision(options, runtime.device), runtime, make_strategy, stream).fit()


class Trainer:
    """Trains on one rank, and holds this rank's model, optimizer, rows and metrics."""

    def __init__(
        self, options: TrainOptions, runtime: Runtime, make_strategy: MakeStrategy, stream: TrainingRows | None
    ) -> None:
        self.options, self.runtime = options, runtime
        cuda_allocator.use_expandable_segments(runtime.device)
        self.folder = RunFolder(f"{options.output}/{options.name}")
        self.source = stream or PackedSource(options, runtime)
        self.evaluation = None if stream else PackedRows(options.data, "eval")
        torch.manual_seed(options.seed)  # the same on all ranks, which must initialize adapters identically
        self.objective = make_strategy.make_objective(options)
        if self.objective.output != "loss" and (options.lora_dropout or options.stream):
            raise UserError("the objective needs packed rows and no dropout. Set stream = false and lora_dropout = 0.")
        self.plan = spread(options.global_batch_rows, options.micro_batch_rows, runtime.world_size)
        with make_strategy.loading(options, runtime, self.plan):
            model = model_io.load_model(options, self.objective.output)
        self.parameters, self.trained = parameters.count(model), parameters.count(model, only_trained=True)
        has_own = make_strategy.make_optimizer is not Strategy.make_optimizer
        notes = (composite.note(model), "" if has_own else optimizers.note(model, options.optimizer))
        self.notes = list(filter(None, notes))
        bounds_loss = make_strategy.bounds_loss and self.objective.bounds_loss
        self.meter = Meter(
            options,
            runtime,
            model,
            self.source.sequence_length,
            objective=self.objective,
            bounds_loss=bounds_loss,
        )
        self.strategy = make_strategy(model, options, runtime, self.plan)
        self.strategy.objective = self.objective
        if self.objective.has_reference:
            self._add_reference()  # while the strategy still holds the base model
        torch.manual_seed(options.seed + runtime.rank)  # each rank has different dropout
        checkpoints.refuse_full_disk(self.strategy, runtime, options.output)
        self._restore()
        self.log_interval = 1  # in steps; adjusted once the duration of a step is known
        self.metric_logger = (
            MetricLogger(self.folder, self.options, runtime, self.done, self.objective.ranking)
            if runtime.rank == 0
            else None
        )

    def _restore(self) -> None:
        """Load the newest checkpoint, if there is one. A run that has stopped early has no more steps."""
        state = checkpoints.restore(self.strategy, self.runtime)
        self.done = self.saved = state.step if state else 0
        self.best = state.best if state else Best()
        if self.options.patience and not self.best:
            raise UserError(
                f"the checkpoint of step {self.done} does not say which one is the best, because an older version of "
                "Raymill saved it. Resume the run with --patience 0, or start over with --fresh."
            )
        if self._has_stopped_early():
            self.options = self.options.model_copy(update={"stop_after": self.done})

    def _add_reference(self) -> None:
        """Add the log-probabilities of the base model to the rows."""
        if isinstance(self.source, PackedSource):  # rows of `inv fit` have some
            self.source.add_reference(self._reference("train"))
        if self.evaluation:
            self.evaluation.reference = self._reference("eval")

    def _reference(self, split: Literal["train", "eval"]) -> np.ndarray:
        values = reference.log_probabilities(self.strategy, self.options, self.runtime, split)
        if problem := self.objective.problem(values):
            raise UserError(problem)
        return values

    def fit(self) -> None:
        """Run the remaining steps and export the model. If the run is asked to stop, nothing is exported."""
        options, trains = self.options, self.done < self.options.last_step
        if self.metric_logger:
            print(self._description(), flush=True)
            for note in self.notes:
                print(note, flush=True)
        if trains:
            self._refuse_failing_export()
            checkpoints.announce(self.strategy, self.runtime, f"{options.output}/{options.name}")
        if self.evaluation and not self.done:
            self._evaluate_at_start(self.evaluation)
        if not self._train():
            self._export()
        self.runtime.wait()
        if self.metric_logger and trains:
            self.metric_logger.end(self.saved)
            self.folder.publish()

    def _train(self) -> bool:
        """Run the remaining steps. Return whether the run was asked to stop."""
        options, first = self.options, self.done + 1
        random_state = checkpoints.random_state(self.runtime.device)
        self.meter.restart()
        for step in range(first, options.last_step + 1):
            self.step(step)
            if step == first:
                self._refuse_random_model(random_state)
                optimizers.check_values(
                    self.strategy.optimizer, self.strategy.kept_values, type(self.strategy).__name__
                )
            saves = step % options.checkpoint_every == 0 or step == options.last_step
            evaluates = saves or step % options.eval_every == 0
            is_due = evaluates or step % self.log_interval == 0
            if is_due and self._log_and_save(evaluates, saves):
                return True
            if self._has_stopped_early():
                self._say(f"stopped early after step {step}: {self._why()}")
                break
        return False

    def _has_stopped_early(self) -> bool:
        options = self.options
        return bool(self.best and 0 < options.patience <= self.best.since and self.saved < options.steps)

    def _why(self) -> str:
        if not (self.best and self.best.step):
            return f"no evaluation had a finite {self.objective.best_metric}"
        return f"no checkpoint is better than that of {self._best()}, and patience = {self.options.patience}"

    def _refuse_random_model(self, before: dict[str, torch.Tensor]) -> None:
        """Raise UserError if a step drew random numbers, but its objective compares log-probabilities."""
        after = checkpoints.random_state(self.runtime.device)
        if self.objective.output != "loss" and any(not torch.equal(before[name], after[name]) for name in before):
            raise UserError(
                f"{self.options.model} has dropout or noise that could not be turned off, so its answers "
                "cannot be compared. Set it to 0 in config.json of a copy, and pass that as --model."
            )

    def _description(self) -> str:
        options, workers = self.options, self.runtime.world_size
        start = f"resumed after step {self.done}" if self.done else "from the start"
        if self.done >= options.last_step:
            start = f"already trained to step {self.done}: --fresh starts over"
        if self._has_stopped_early():
            start = f"stopped early after step {self.done}: {self._why()}; a larger --patience continues"
        passes = "1 pass" if self.plan.accumulation == 1 else f"{self.plan.accumulation} passes"
        return (
            f"{options.name}: {self._size()}, {options.strategy} on {workers} x {self.runtime.device.type} "
            f"in {options.precision}; {options.global_batch_rows} rows per step = {workers} workers x "
            f"{options.micro_batch_rows} rows x {passes}; {self._length()}; {start}"
        )

    def _length(self) -> str:
        """Return the length of the schedule, in steps and in epochs."""
        steps, rows = self.options.steps, self.source.rows_per_epoch
        if not rows:
            return f"{steps:,} steps"
        epochs = steps * self.options.global_batch_rows / rows
        return f"{steps:,} steps = {epochs:.2f} epochs of {rows:,} rows"

    def _size(self) -> str:
        if self.trained == self.parameters:
            return f"{self.parameters:,} parameters"
        return f"{self.trained:,} trained of {self.parameters:,} parameters"

    def step(self, step: int) -> None:
        """Run one optimizer step on this rank's rows of a global batch.

        The loss is the mean over the trained tokens (or pairs) of the global batch, so the weight of a token depends
        neither on the number of workers nor on padding. The factor world_size undoes the averaging of gradients over
        the ranks.
        """
        batch = self._on_device(self.source.rows(step))
        counts, terms = total(self.objective.counts(batch)), len(self.objective.terms)
        counts[:terms].clamp_(min=1)
        scale = self.runtime.world_size / counts[:terms]
        micro_batches = _split(batch, self.options.micro_batch_rows)
        self.strategy.set_baseline(micro_batches)
        sums = [
            self.strategy.accumulate(micro_batch, scale, last=number == len(micro_batches))
            for number, micro_batch in enumerate(micro_batches, 1)
        ]
        learning_rate = self.strategy.learning_rate(self.options, step)
        norm = self.strategy.step(learning_rate)
        self.meter.add(step, learning_rate, torch.stack(sums), counts, norm)

    def _log_and_save(self, evaluates: bool, saves: bool) -> bool:
        """Log the steps since the last call, and evaluate and save if due. Return whether the run was asked to stop."""
        rows = self._read_meter()
        interval = max(1, round(PROGRESS_INTERVAL_S / self.meter.seconds_per_step))
        self.log_interval = min(self.options.log_every, interval)
        stops = any_rank(self.runtime.should_stop(), self.runtime.device)
        if self.evaluation and (evaluates or stops):
            rows[-1] |= self._evaluate(self.evaluation)
        if self.metric_logger:
            self.metric_logger.write(rows, self.meter.seconds_per_step)
        if saves or stops or self._machine_is_leaving(rows[-1]):
            started = time.monotonic()
            scored = rows[-1] | {SCORE: self._count(rows[-1])}
            checkpoints.save(self.strategy, self.runtime, scored, self.options.output, self.best)
            self.saved = int(rows[-1]["step"])
            if self.metric_logger:
                self.metric_logger.checkpoint(self.saved, time.monotonic() - started)
            self.folder.publish()
        self.meter.restart()
        return stops

    def _count(self, row: Metrics) -> float:
        """Compare a new checkpoint with the best one, and return its score. All ranks get the same one.

        Only regular checkpoints count, so that an interrupted run stops at the same step and exports the same weights.
        """
        step, options = int(row["step"]), self.options
        if step % options.checkpoint_every and step != options.steps:
            return WORST
        score = kept_by = largest(self.objective.ranking.score(row), self.runtime.device)
        if self.best:
            kept_by, self.best = self.best.rank(score), self.best.after(step, score)
        return kept_by

    def _read_meter(self) -> list[Metrics]:
        """Return the metrics of the steps since the last call.

        Raises:
            UserError: a step diverged. All ranks raise it, and the diverged state is not saved.
        """
        try:
            return self.meter.read()
        except Diverged as diverged:
            self.runtime.wait()  # until the last checkpoint is stored
            if broken := weights_check.first_not_finite(self.options.model):
                raise UserError(
                    f"step {diverged.step} diverged ({diverged}), because {broken} of {self.options.model} has "
                    "elements that are not finite. Download the model again, or pass another one."
                ) from None
            good = f"the last good checkpoint is from step {self.saved}" if self.saved else "there is no checkpoint yet"
            raise UserError(
                f"step {diverged.step} diverged{self._rows_of(diverged)}: {diverged}; {good}. Check the rows, or start "
                "over with --fresh and a lower --learning-rate or more --warmup-steps."
            ) from None

    def _rows_of(self, diverged: Diverged) -> str:
        """Return a phrase that names up to MAX_ROWS_LISTED of the responsible rows, or an empty string for a stream."""
        rows, end = self.options.micro_batch_rows, self.options.global_batch_rows
        names = [
            name
            for first in (micro_batch * rows for micro_batch in diverged.micro_batches)
            for name in self.source.names(diverged.step, first, max(0, min(rows, end - first)))
        ]
        more = f" and {len(names) - MAX_ROWS_LISTED} more" if len(names) > MAX_ROWS_LISTED else ""
        return f" on rows {', '.join(names[:MAX_ROWS_LISTED])}{more} of {self.options.data}/train" if names else ""

    def _machine_is_leaving(self, row: Metrics) -> bool:
        if not self.runtime.should_save():
            return False
        if self.metric_logger:
            print(f"a machine is about to be taken away: saving a checkpoint after step {row['step']}", flush=True)
        return True

    def _evaluate_at_start(self, rows: PackedRows) -> None:
        evaluated = self._evaluate(rows)
        if self.metric_logger:
            self.metric_logger.write_start(evaluated)

    def _evaluate(self, rows: PackedRows) -> Metrics:
        self.strategy.module.eval()
        metrics = held_out.evaluate(
            rows,
            self.options.micro_batch_rows,
            self.runtime,
            self.objective,
            self.strategy.summed_loss,
            self.strategy.set_baseline,
        )
        self.strategy.module.train()
        return metrics

    def _refuse_failing_export(self) -> None:
        """Try on rank 0 all of the export but its weights. If it fails, all ranks raise UserError."""

        def try_export() -> None:
            if self.runtime.rank == 0:
                model_io.try_export(self.strategy.model, self._tokenizer(), self.source.eos_ids, self.options)

        if reason := self._failure(try_export):
            raise UserError(
                f"the trained model could not be exported ({reason}). Correct the files of {self.options.model}, or "
                "pass another --model."
            )

    def _export(self) -> None:
        """Export the model: with `patience`, that of the best checkpoint.

        Raises:
            UserError: the best checkpoint cannot be loaded, or the export failed. All ranks raise it after the last
                checkpoint is stored.
        """
        step = self._load_best() if self.options.patience else self.saved

        def export() -> None:
            model_io.export(self.strategy, self._tokenizer(), self.source.eos_ids, self.folder.path, self.options)

        if reason := self._failure(export):
            self.runtime.wait()
            again = "again without --fresh" if self.options.fresh else "again"
            raise UserError(
                f"the model is trained, but its export failed ({reason}). Its checkpoint of step {self.saved} is "
                f"complete: correct this, then run the same command {again} to export without training."
            )
        if self.metric_logger:
            self.metric_logger.export(step, self._has_stopped_early())
        self.folder.publish()

    def _load_best(self) -> int:
        """Load the best checkpoint, and return its step."""
        best = self.best or Best()
        if not best.since and not best.step:
            self._say(f"note: there is no regular checkpoint yet, so the model of step {self.saved} is exported")
            return self.saved
        self.runtime.wait()
        without = ", without --fresh" if self.options.fresh else ""
        last = f"To export the last checkpoint, add --patience 0 --stop-after {self.saved}{without}."
        if not best.step:
            metric = self.objective.best_metric
            raise UserError(f"no checkpoint is the best one, because no evaluation had a finite {metric}. {last}")
        self._say(f"exporting the best checkpoint: {self._best()}")
        if best.step != self.saved and not checkpoints.load(self.strategy, self.runtime, best.step):
            raise UserError(f"the best checkpoint, that of step {best.step}, is missing or damaged. {last}")
        return best.step

    def _best(self) -> str:
        best = self.best or Best()
        return f"step {best.step} ({self.objective.ranking.describe(best.score)})"

    def _say(self, sentence: str) -> None:
        if self.runtime.rank == 0:
            print(sentence, flush=True)

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.options.model, self.source.chat_template)

    def _failure(self, work: Callable[[], None]) -> str:
        """Run `work`, and return why it failed on this or another rank. Return "" if it failed on none."""
        reason = ""
        try:
            work()
        except (torch.OutOfMemoryError, torch.distributed.DistError):
            raise  # the other ranks wait in a collective, not for this reason
        except Exception as error:
            reason = failures.reason(error)
        failed = any_rank(bool(reason), self.runtime.device)
        return reason or "it failed on another worker" if failed else ""

    def _on_device(self, batch: Batch) -> Batch:
        return {name: column.to(self.runtime.device, non_blocking=True) for name, column in batch.items()}


def _split(batch: Batch, rows: int) -> list[Batch]:
    """Split a batch into micro-batches of `rows` rows."""
    columns = [column.split(rows) for column in batch.values()]
    return [dict(zip(batch, parts, strict=True)) for parts in zip(*columns, strict=True)]
