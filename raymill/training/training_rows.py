"""The training rows of a rank, by step."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from raymill.data.tokenization import NOT_TRAINED
from raymill.training.dataset import Batch, PackedRows, read_manifest
from raymill.training.options import TrainOptions
from raymill.training.runtimes.runtime import Runtime
from raymill.training.schedule import spread


class TrainingRows(Protocol):
    """The training rows of this rank."""

    sequence_length: int
    chat_template: str | None
    """Chat template of the rows, which is exported with the trained model. None: the template of the base model."""
    eos_ids: list[int]
    """IDs of the tokens at which the trained model stops. Empty: those of the base model."""
    rows_per_epoch: int | None
    """Number of different rows of all ranks. None: it is not known."""

    def rows(self, step: int) -> Batch:
        """Return this rank's rows for an optimizer step. The first step is 1."""
        ...

    def names(self, step: int, first: int, count: int) -> list[str]:
        """Return the names of `count` rows of the step's global batch, starting with row `first`."""
        ...


class PackedSource:
    """Reads packed rows. The step and the rank determine the rows, so a resumed run continues exactly where it stopped.

    While a step computes, another thread reads the rows of the next step.
    """

    def __init__(self, options: TrainOptions, runtime: Runtime) -> None:
        manifest = read_manifest(options.data)
        self.sequence_length = manifest.sequence_length
        self.chat_template = manifest.tokenizer.chat_template
        self.eos_ids = manifest.tokenizer.eos_ids
        self._rows = PackedRows(options.data, "train", options.seed)
        self.rows_per_epoch = len(self._rows)
        self._global_rows = options.global_batch_rows
        plan = spread(options.global_batch_rows, options.micro_batch_rows, runtime.world_size)
        self._rank_rows = plan.rows_per_rank
        self._offset = runtime.rank * self._rank_rows
        self._on_gpu = runtime.device.type == "cuda"
        self._reader = ThreadPoolExecutor(1, "rows")
        self._read_ahead: dict[int, Future[Batch]] = {}

    def add_reference(self, values: np.ndarray) -> None:
        """Add what `PackedRows.reference` says. Call it before `rows`."""
        self._rows.reference = values

    def rows(self, step: int) -> Batch:
        reading = self._read_ahead.pop(step, None) or self._reader.submit(self._read, step)
        self._read_ahead = {step + 1: self._reader.submit(self._read, step + 1)}
        return reading.result()

    def _read(self, step: int) -> Batch:
        batch = self._rows.read((step - 1) * self._global_rows + self._offset, self._rank_rows)
        batch["labels"][max(0, self._global_rows - self._offset) :] = NOT_TRAINED  # these rows belong to the next step
        # from pinned memory, the copy to the GPU runs while the GPU computes
        return {name: column.pin_memory() for name, column in batch.items()} if self._on_gpu else batch

    def names(self, step: int, first: int, count: int) -> list[str]:
        return self._rows.names((step - 1) * self._global_rows + first, count)
