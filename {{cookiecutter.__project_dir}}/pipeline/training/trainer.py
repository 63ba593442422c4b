"""The training loop: one for every strategy and every launcher."""

import math
import os
from typing import Protocol

import torch

from pipeline.data.tokenization import NOT_TRAINED
from pipeline.data.tokenizer import load_tokenizer
from pipeline.training import checkpoints, models
from pipeline.training.collectives import any_rank, total
from pipeline.training.dataset import Batch, PackedRows, read_manifest, trained_tokens
from pipeline.training.meter import Diverged, Meter
from pipeline.training.metric_logger import MetricLogger
from pipeline.training.options import TrainOptions
from pipeline.training.runtimes.runtime import Metrics, Runtime
from pipeline.training.schedule import learning_rate_at, peak_learning_rate, spread
from pipeline.training.storage import RunFolder
from pipeline.training.strategies import MakeStrategy
from settings import UserError

ROWS_NAMED = 8
SECONDS_BETWEEN_LOOKS = 10  # at most, or log_every steps: a spot machine goes two minutes after its notice


class Source(Protocol):
    """Where this rank's rows come from."""

    sequence_length: int
    chat_template: str | None
    """What the rows were made with, for the tokenizer of the trained model; None: the model's own."""
    eos_ids: list[int]
    """Tokens at which the trained model stops; none: those of the model."""

    def rows(self, step: int) -> Batch:
        """This rank's rows of optimizer step `step`, counted from 1."""
        ...

    def names(self, step: int, first: int, count: int) -> list[str]:
        """Where `count` rows of the global batch of a step come from, from its row `first` on."""
        ...


class PackedSource:
    """Rows by position: the step and the rank say which, so a resumed run reads on exactly where it was."""

    def __init__(self, options: TrainOptions, run: Runtime) -> None:
        manifest = read_manifest(options.data)
        self.sequence_length = manifest.sequence_length
        self.chat_template = manifest.tokenizer.chat_template
        self.eos_ids = manifest.tokenizer.eos_ids
        self._rows = PackedRows(options.data, "train", options.seed)
        self._global_rows = options.global_batch_rows
        self._rank_rows = spread(options.global_batch_rows, options.micro_batch_rows, run.world_size).rows_per_rank
        self._offset = run.rank * self._rank_rows

    def rows(self, step: int) -> Batch:
        batch = self._rows.read((step - 1) * self._global_rows + self._offset, self._rank_rows)
        batch["labels"][max(0, self._global_rows - self._offset) :] = NOT_TRAINED  # they are of the next step
        return batch

    def names(self, step: int, first: int, count: int) -> list[str]:
        return self._rows.names((step - 1) * self._global_rows + first, count)


def train(options: TrainOptions, run: Runtime, make_strategy: MakeStrategy, stream: Source | None = None) -> None:
    """Train on to `options.last_step` from the run's last checkpoint, or from the model; then write the model.

    The rows come from `stream`, or from the packed data. Paths in `options` are absolute, or URIs.

    Raises:
        UserError: on every rank alike, so that none waits for another.
    """
    os.environ["DS_ACCELERATOR"] = run.device.type  # transformers imports deepspeed, which would guess, and say so
    torch.set_num_threads(min(options.cpus_per_worker, os.cpu_count() or 1))  # logical CPUs may be more than real ones
    Trainer(models.with_supported_precision(options, run.device), run, make_strategy, stream).fit()


class Trainer:
    """What one rank holds of a training, and the steps that change it."""

    def __init__(self, options: TrainOptions, run: Runtime, make_strategy: MakeStrategy, stream: Source | None) -> None:
        self.options, self.run = options, run
        self.folder = RunFolder(f"{options.output}/{options.name}")
        self.source = stream or PackedSource(options, run)
        self.evaluation = None if stream else PackedRows(options.data, "eval")
        torch.manual_seed(options.seed)  # adapters begin alike on all ranks
        model = models.load_model(options)
        self.parameters, self.trained = model.num_parameters(), model.num_parameters(only_trainable=True)
        self.meter = Meter(options, run, model, self.source.sequence_length)
        self.plan = spread(options.global_batch_rows, options.micro_batch_rows, run.world_size)
        self.strategy = make_strategy(model, options, run, self.plan)
        torch.manual_seed(options.seed + run.rank)  # dropout differs
        checkpoints.refuse_full_disk(self.strategy, run, options.output)
        self.done = self.saved = checkpoints.restore(self.strategy, run)
        self.pace = 1  # steps between looks; the first one says how long a step takes
        self.metric_logger = MetricLogger(self.folder, options, run, self.done) if run.rank == 0 else None

    def fit(self) -> None:
        """The steps that are left, and the model at the end; without it when the run was asked to stop."""
        options = self.options
        if self.metric_logger:
            print(self._description(), flush=True)
        self.meter.restart()
        for step in range(self.done + 1, options.last_step + 1):
            self._step(step)
            saves = step % options.checkpoint_every == 0 or step == options.last_step
            evaluates = saves or step % options.eval_every == 0
            is_due = evaluates or step % self.pace == 0
            if is_due and self._take_stock(evaluates, saves):
                break
        else:
            self._export()
        self.run.wait()
        if self.metric_logger and self.done < options.last_step:
            self.metric_logger.end(self.saved)
            self.folder.publish()

    def _description(self) -> str:
        options, workers = self.options, self.run.world_size
        begin = f"resumed after step {self.done}" if self.done else "from the start"
        if self.done >= options.last_step:
            begin = f"trained to step {self.done} already: --fresh starts over"
        return (
            f"{options.name}: {self._size()}, {options.strategy} on {workers} x {self.run.device.type} "
            f"in {options.precision}; {options.global_batch_rows} rows a step = {workers} workers x "
            f"{self.plan.accumulation} passes x {options.micro_batch_rows} rows; {begin}"
        )

    def _size(self) -> str:
        if self.trained == self.parameters:
            return f"{self.parameters:,} parameters"
        return f"{self.trained:,} trained of {self.parameters:,} parameters"

    def _step(self, step: int) -> None:
        """One optimizer step over this rank's rows of a global batch.

        The loss is the mean over the trained tokens of the whole global batch, so that neither the number of
        workers nor the padding changes what a token weighs. Gradients are averaged over the ranks, hence the
        factor world_size.
        """
        batch = self._on_device(self.source.rows(step))
        tokens = total(trained_tokens(batch)).clamp(min=1)
        micro_batches = _split(batch, self.options.micro_batch_rows)
        losses = [
            self.strategy.accumulate(micro_batch, self.run.world_size / tokens, last=number == len(micro_batches))
            for number, micro_batch in enumerate(micro_batches, 1)
        ]
        learning_rate = _learning_rate(self.options, step)
        norm = self.strategy.step(learning_rate)
        self.meter.add(step, learning_rate, torch.stack(losses) / tokens, norm)

    def _take_stock(self, evaluates: bool, saves: bool) -> bool:
        """Read the meter, and evaluate, write and save what is due; True where the run was asked to stop."""
        rows = self._read_meter()
        self.pace = min(self.options.log_every, max(1, round(SECONDS_BETWEEN_LOOKS / self.meter.seconds_per_step)))
        stops = any_rank(self.run.should_stop(), self.run.device)
        if self.evaluation and (evaluates or stops):
            rows[-1] |= self._evaluate(self.evaluation)
        if self.metric_logger:
            self.metric_logger.write(rows, self.meter.seconds_per_step)
        if saves or stops or self._is_to_lose_a_machine(rows[-1]):
            checkpoints.save(self.strategy, self.run, rows[-1], self.options.output)
            self.saved = int(rows[-1]["step"])
            if self.metric_logger:
                self.metric_logger.checkpoint(self.saved)
            self.folder.publish()
        self.meter.restart()
        return stops

    def _read_meter(self) -> list[Metrics]:
        """The steps since the last look.

        Raises:
            UserError: one of them diverged, on every rank alike; nothing of it was saved.
        """
        try:
            return self.meter.read()
        except Diverged as diverged:
            self.run.wait()  # for a checkpoint that is still being written
            good = (
                f"the last good checkpoint is that of step {self.saved}" if self.saved else "there is no checkpoint yet"
            )
            raise UserError(
                f"step {diverged.step} diverged{self._rows_of(diverged)}: {diverged}; {good}. Look at the rows, or "
                "start over with --fresh and a lower --learning-rate or a longer --warmup-steps."
            ) from None

    def _rows_of(self, diverged: Diverged) -> str:
        """The rows that made it, the first of them by name; nothing where the source knows no names."""
        rows, end = self.options.micro_batch_rows, self.options.global_batch_rows
        names = [
            name
            for first in (micro_batch * rows for micro_batch in diverged.micro_batches)
            for name in self.source.names(diverged.step, first, max(0, min(rows, end - first)))
        ]
        more = f" and {len(names) - ROWS_NAMED} more" if len(names) > ROWS_NAMED else ""
        return f" on the rows {', '.join(names[:ROWS_NAMED])}{more} of {self.options.data}/train" if names else ""

    def _is_to_lose_a_machine(self, row: Metrics) -> bool:
        if not self.run.should_save():
            return False
        if self.metric_logger:
            print(f"a machine is about to be taken away: a checkpoint of step {row['step']} is written now", flush=True)
        return True

    @torch.no_grad()
    def _evaluate(self, rows: PackedRows) -> Metrics:
        """Loss and perplexity over all the evaluation tokens of all ranks.

        Every rank makes the same number of forward passes, as one may be collective; what runs over the
        end of the rows is not counted.
        """
        micro_rows = self.options.micro_batch_rows
        sums = torch.zeros(2, dtype=torch.float64, device=self.run.device)
        self.strategy.module.eval()
        for turn in range(math.ceil(len(rows) / (micro_rows * self.run.world_size))):
            first = (turn * self.run.world_size + self.run.rank) * micro_rows
            batch = self._on_device(rows.read(first, micro_rows))
            batch["labels"][max(0, len(rows) - first) :] = NOT_TRAINED
            sums += torch.stack([self.strategy.summed_loss(batch).double(), trained_tokens(batch).double()])
        self.strategy.module.train()
        loss, tokens = total(sums).tolist()
        return {"eval_loss": loss / tokens, "eval_perplexity": math.exp(loss / tokens)}

    def _export(self) -> None:
        tokenizer = load_tokenizer(self.options.model, self.source.chat_template)
        models.export(self.strategy, tokenizer, self.source.eos_ids, self.folder.path, self.options)
        self.folder.publish()

    def _on_device(self, batch: Batch) -> Batch:
        return {name: column.to(self.run.device, non_blocking=True) for name, column in batch.items()}


def _split(batch: Batch, rows: int) -> list[Batch]:
    """Micro-batches of `rows` rows each."""
    columns = [column.split(rows) for column in batch.values()]
    return [dict(zip(batch, parts, strict=True)) for parts in zip(*columns, strict=True)]


def _learning_rate(options: TrainOptions, step: int) -> float:
    return learning_rate_at(
        step,
        peak=peak_learning_rate(options.learning_rate, options.global_batch_rows, options.reference_batch_rows),
        warmup_steps=options.warmup_steps,
        steps=options.steps,
        min_ratio=options.min_lr_ratio,
    )
