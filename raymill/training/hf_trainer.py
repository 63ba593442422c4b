"""Connects transformers' `Trainer` with a run: its rows, its metrics, its checkpoints and its trained model."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from raymill import settings
from raymill.data.tokenization import NOT_TRAINED
from raymill.data.tokenizer import load_tokenizer
from raymill.errors import UserError
from raymill.training import checkpoint_check, checkpoints, held_out, model_io
from raymill.training.checkpoint_check import State
from raymill.training.collectives import total
from raymill.training.dataset import Batch, PackedRows, read_manifest
from raymill.training.deepspeed_zero import import_deepspeed
from raymill.training.meter import peak_memory
from raymill.training.metric_logger import MetricLogger
from raymill.training.objectives import Supervised
from raymill.training.options import TrainOptions
from raymill.training.packed_attention import attention_mask
from raymill.training.runtimes.runtime import SCORE, Metrics, Runtime
from raymill.training.schedule import spread
from raymill.training.storage import RunFolder
from raymill.training.trainer import PROGRESS_INTERVAL_S
from raymill.training.weight_files import Weight

OF_CALLBACK = {
    "output_dir": "",
    "num_train_epochs": 1,  # of as many rows as the steps need
    "logging_strategy": "no",
    "eval_strategy": "no",
    "save_strategy": "no",
    "save_only_model": False,
    "save_on_each_node": False,
    "load_best_model_at_end": False,
    "restore_callback_states_from_checkpoint": False,
    "ignore_data_skip": False,
    "train_sampling_strategy": "sequential",  # the dataset shuffles
    "remove_unused_columns": False,
    "average_tokens_across_devices": True,  # the mean over the trained tokens of the global batch
    "logging_nan_inf_filter": False,
    "disable_tqdm": True,
    "use_cache": True,  # goes to the exported configuration; `keep_documents_apart` sets it for training
}
"""Arguments that `PackedDataset` and `RunCallback` rely on. The callback decides when to log, evaluate and save."""

FROM_TRAINER = {"bf16": {"enabled": "auto"}} | dict.fromkeys(
    ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
"""Values of a DeepSpeed configuration that the Trainer replaces with its own arguments."""


Arguments = TypeVar("Arguments", bound=TrainingArguments)


def check_arguments(
    given: Mapping[str, Any], of_job: Mapping[str, Any], kind: type[TrainingArguments] = TrainingArguments
) -> None:
    """Refuse arguments that the class does not have, and those that the job sets itself."""
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    for name in given:
        if name not in known:
            problem = settings.no_such_key(name, known)
            raise UserError(f"arguments in [hf]: {name}: {problem} Use the names of {kind.__name__}.")
        if name in OF_CALLBACK or name in of_job:
            raise UserError(
                f"arguments in [hf] cannot have {name}, because the job sets it from the options in [train]. Remove it."
            )


def training_arguments(
    given: Mapping[str, Any], of_job: Mapping[str, Any], kind: type[Arguments] = TrainingArguments
) -> Arguments:
    """Return the given arguments, those of the job and OF_CALLBACK as one object.

    Args:
        kind: TrainingArguments, or a subclass such as TRL's SFTConfig.

    Raises:
        UserError: transformers refuses a value.
    """
    values = {**given, **OF_CALLBACK, **of_job}
    if isinstance(config := given.get("deepspeed"), dict):
        values["deepspeed"] = FROM_TRAINER | config
        import_deepspeed()
    try:
        arguments = kind(**values)
    except (ValueError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"transformers refuses the arguments ({reason}). Correct arguments in [hf].") from None
    workers = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if arguments.world_size != workers:  # each worker would train alone
        raise UserError(f"transformers sees {arguments.world_size} of {workers} workers. Correct arguments in [hf].")
    return arguments


class PackedDataset(Dataset[Batch]):
    """The packed rows of a run, in the order of the project's own trainer.

    If the global batch does not divide evenly among the workers, each step has more rows than count, as in `spread`.
    """

    def __init__(self, options: TrainOptions, workers: int) -> None:
        self._rows = PackedRows(options.data, "train", options.seed)
        self._global_rows = options.global_batch_rows
        plan = spread(options.global_batch_rows, options.micro_batch_rows, workers)
        self._rows_per_step = workers * plan.rows_per_rank
        self._length = options.steps * self._rows_per_step

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, positions: list[int]) -> Batch:
        """Return a micro-batch. A DataLoader calls this method instead of `__getitem__`."""
        step, first = divmod(positions[0], self._rows_per_step)
        batch = self._rows.read(step * self._global_rows + first, len(positions))
        batch["labels"][max(0, self._global_rows - first) :] = NOT_TRAINED  # these rows belong to the next step
        batch["labels"][:, 0] = NOT_TRAINED  # nothing predicts it, but the Trainer would count it for some models
        return batch

    @staticmethod
    def collate(batch: Batch) -> Batch:
        return batch


def keep_documents_apart(model: PreTrainedModel) -> None:
    """Let a model compute masks from a batch of packed rows, so that no document attends to another.

    A hook does this, because a Trainer passes batches to the model in many places.
    """

    def add_mask(_: nn.Module, positional: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "document_starts" not in inputs:
            return positional, inputs
        others = {name: value for name, value in inputs.items() if name != "document_starts"}
        return positional, others | {"attention_mask": attention_mask(model, inputs), "use_cache": False}

    model.register_forward_pre_hook(add_mask, with_kwargs=True)
    model.accepts_loss_kwargs = True  # some models deny it, and the Trainer would then average per micro-batch


class RunCallback(TrainerCallback):
    """Logs, evaluates and saves a run of a Trainer as the project's own trainer does.

    The Trainer writes a checkpoint to this machine, and this callback stores it in the run's folder in the background:
    on each rank, only the files that this rank wrote.
    """

    def __init__(self, options: TrainOptions, runtime: Runtime, model: PreTrainedModel) -> None:
        self.options, self.runtime, self.model = options, runtime, model
        self._folder = RunFolder(f"{options.output}/{options.name}")
        self._manifest = read_manifest(options.data)
        self._held_out = PackedRows(options.data, "eval")
        self._complete = checkpoints.complete(runtime)
        self._logger: MetricLogger | None = None
        self._log_interval = 1  # in steps; adjusted once the duration of a step is known
        self._row: Metrics = {}
        total(torch.zeros(1, device=runtime.device))  # wait until all ranks have deleted what dead workers left
        # checkpoints of the Trainer refuse many published ones, such as those with a temperature but without do_sample
        self._generation_config, model.generation_config = model.generation_config, GenerationConfig()

    def newest_checkpoint(self) -> str | None:
        """Return the folder of the newest complete checkpoint, or None. The folder exists until the first step."""
        folder, _ = next(self._complete, (None, None))
        return str(folder) if folder else None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._done = self._logged = self._saved = state.global_step
        if self.runtime.rank == 0:
            start = f"resumed after step {self._done}" if self._done else "from the start"
            workers = f"{self.options.strategy} on {self.runtime.world_size} x {self.runtime.device.type}"
            print(f"{self.options.name}: {workers}; {start}", flush=True)
            self._logger = MetricLogger(self._folder, self.options, self.runtime, self._done, Supervised().ranking)
        evaluated = {} if self._done else self._evaluate()
        if self._logger and evaluated:
            self._logger.write_start(evaluated)
        self._restart_clock()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Decide what is due after a step. All ranks decide the same."""
        self._complete.close()
        step, options = state.global_step, self.options
        control.should_save = step % options.checkpoint_every == 0 or step == options.steps
        self._evaluates = control.should_save or step % options.eval_every == 0
        control.should_log = self._evaluates or step % self._log_interval == 0
        if control.should_log and self.runtime.should_save():
            if self.runtime.rank == 0:
                print(f"a machine is about to be taken away: saving a checkpoint after step {step}", flush=True)
            control.should_save = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Metrics, **_: Any
    ) -> None:
        """Log the mean loss since the last call. The Trainer calls this before it saves."""
        if "loss" not in logs:
            return  # a summary after the last step
        seconds = torch.tensor(time.perf_counter() - self._started, device=self.runtime.device)
        seconds_per_step = float(total(seconds)) / self.runtime.world_size / (state.global_step - self._logged)
        tokens = self.options.global_batch_rows * self._manifest.sequence_length
        self._row = {
            "step": state.global_step,
            "lr": logs["learning_rate"],
            "loss": logs["loss"],
            "grad_norm": float(logs["grad_norm"]),
            "tokens_per_s": tokens / seconds_per_step,
            "memory_gib": peak_memory(self.runtime.device) / 2**30,
        }
        self._refuse_divergence()
        if self._evaluates:
            self._row |= self._evaluate()
        if self._logger:
            self._logger.write([self._row], seconds_per_step)
        interval = max(1, round(PROGRESS_INTERVAL_S / seconds_per_step))
        self._logged, self._log_interval = state.global_step, min(self.options.log_every, interval)
        if control.should_save:
            self._waiting_since = time.monotonic()
            self.runtime.wait()  # the disk may have room for only one checkpoint
        self._restart_clock()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start to store the checkpoint that the Trainer wrote."""
        written = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        seal = State(step=state.global_step, world_size=self.runtime.world_size)
        written.mkdir(parents=True, exist_ok=True)

        def write(folder: Path) -> None:
            written.rename(folder)
            checkpoint_check.seal(folder, self.runtime.rank, seal, has_checksums=False)

        self.runtime.report(self._row | {SCORE: Supervised().ranking.score(self._row)}, write)
        self._saved = state.global_step
        if self._logger:
            self._logger.checkpoint(state.global_step, time.monotonic() - self._waiting_since)
        self._folder.publish()
        self._restart_clock()

    def finish(self) -> None:
        """Export the trained model to `model/` in the run's folder. All ranks must call this after the last step."""
        self.model.generation_config = self._generation_config
        tokenizer = load_tokenizer(self.options.model, self._manifest.tokenizer.chat_template)
        model_io.export(self, tokenizer, self._manifest.tokenizer.eos_ids, self._folder.path, self.options)
        self._folder.publish()
        self.runtime.wait()
        if self._logger and self._done < self.options.steps:
            self._logger.end(self._saved)
            self._folder.publish()

    def gather(self) -> Iterator[Weight]:
        """Yield the full trained parameters on rank 0, one at a time, and nothing on the other ranks."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                with _gathered(parameter) as whole:
                    copy = whole.detach().cpu().clone() if self.runtime.rank == 0 else None
                if copy is not None:
                    yield name, copy

    def _evaluate(self) -> Metrics:
        def summed_loss(batch: Batch) -> torch.Tensor:
            return self.model(**batch, num_items_in_batch=1).loss.reshape(1)

        rows, micro_rows = self._held_out, self.options.micro_batch_rows
        self.model.eval()
        metrics = held_out.evaluate(rows, micro_rows, self.runtime, Supervised(), summed_loss)
        self.model.train()
        return metrics

    def _refuse_divergence(self) -> None:
        """Raise UserError on all ranks if the loss or the gradient is not finite."""
        for name in ("loss", "grad_norm"):
            if not math.isfinite(self._row[name]):
                self.runtime.wait()  # until the last checkpoint is stored
                raise UserError(
                    f"step {self._row['step']} diverged: {name} is {self._row[name]}. Start over with --fresh and a "
                    "lower --learning-rate or more --warmup-steps."
                )

    def _restart_clock(self) -> None:
        self._started = time.perf_counter()


@contextmanager
def _gathered(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    """Yield the whole of a parameter that FSDP or ZeRO-3 may have sharded. All ranks must call this."""
    if isinstance(parameter, DTensor):
        yield parameter.full_tensor()
    elif hasattr(parameter, "ds_id"):
        with import_deepspeed().zero.GatheredParameters([parameter]):
            yield parameter
    else:
        yield parameter
