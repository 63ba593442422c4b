"""The `Runtime` interface between the trainer and Ray Train, torchrun or a single process."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from raymill import state_files
from raymill.training.ranking import Ranking

METRICS = "metrics.json"
"""Name of the file in a checkpoint's folder that holds the metrics of its step."""

Metrics = dict[str, float]
"""Numbers that describe one step, by name."""

SCORE = "checkpoint_score"
"""The metric by which a runtime keeps the best checkpoints: smaller numbers are better. A checkpoint that a run without
interruptions would not have has the number WORST."""

WriteCheckpoint = Callable[[Path], None]
"""Writes this rank's part of a checkpoint to an empty folder. If the strategy has copied the state, another thread may
call this function while training continues (see `Strategy.copies_state`)."""


class Runtime(Protocol):
    """What the trainer needs from its environment. Every rank makes the same calls in the same order."""

    rank: int
    world_size: int
    local_world_size: int
    """Number of ranks on this rank's machine. The ranks of a machine are consecutive numbers."""

    @property
    def scratch(self) -> Path | None:
        """Folder to which this rank first writes its part of a checkpoint; None if it writes to the run's folder."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model` on the device, wrapped so that its gradients are averaged over the ranks."""
        ...

    def show_metrics(self, metrics: Metrics) -> None:
        """Export the latest metrics for monitoring. Only rank 0 calls this."""
        ...

    def report(self, metrics: Metrics, write: WriteCheckpoint) -> None:
        """Start storing a checkpoint of all ranks. It can be loaded once it is complete. `metrics` include SCORE."""
        ...

    def wait(self) -> None:
        """Wait until the reported checkpoint is stored."""
        ...

    def checkpoints(self, step: int | None = None) -> Iterator[Path]:
        """Yield the folders of the stored checkpoints, or only those of a step, newest first.

        Each holds the parts of all ranks.
        """
        ...

    def should_stop(self) -> bool:
        """Return whether this rank was asked to save a checkpoint and stop."""
        ...

    def should_save(self) -> bool:
        """Return whether to save a checkpoint now, because one of the run's machines is about to be taken away."""
        ...


class SingleProcess:
    """A `Runtime` for this process alone. Set `stop` to end the training early."""

    rank = 0
    world_size = 1
    local_world_size = 1
    scratch = None

    def __init__(self, folder: Path, device: torch.device, keep_checkpoints: int) -> None:
        self.device = device
        self.stop = False
        self._folder = folder
        self._keep_checkpoints = keep_checkpoints
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        for partial in folder.glob(".step-*"):  # left by a killed run
            shutil.rmtree(partial, ignore_errors=True)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def show_metrics(self, metrics: Metrics) -> None:
        """Do nothing, because the metrics are in metrics.jsonl and TensorBoard."""

    def report(self, metrics: Metrics, write: WriteCheckpoint) -> None:
        self._pending = self._writer.submit(self._keep, metrics, write)

    def wait(self) -> None:
        if self._pending:
            self._pending.result()

    def checkpoints(self, step: int | None = None) -> Iterator[Path]:
        yield from sorted(self._folder.glob("step-*" if step is None else f"step-{step:08d}"), reverse=True)

    def should_stop(self) -> bool:
        return self.stop

    def should_save(self) -> bool:
        return False

    def _keep(self, metrics: Metrics, write: WriteCheckpoint) -> None:
        partial = self._folder / f".step-{metrics['step']:08d}"
        partial.mkdir(parents=True)
        write(partial)
        self._publish(partial, metrics)

    def _publish(self, partial: Path, metrics: Metrics) -> None:
        """Give a complete folder its final name. Delete all checkpoints but the best and the last."""
        (partial / METRICS).write_text(json.dumps(metrics))
        folder = partial.with_name(partial.name.removeprefix("."))
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete checkpoint, which `restore` skipped
        partial.rename(folder)
        last, *others = self.checkpoints()
        for folder in sorted([last, *others], key=_score)[self._keep_checkpoints :]:
            if folder != last:
                # rename the folder first, so that a kill during the deletion leaves no broken checkpoint
                shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}")))


def _score(checkpoint: Path) -> float:
    """Return the score of a checkpoint, or WORST if its metrics are damaged."""
    file = checkpoint / METRICS
    metrics = (state_files.parse(file.read_bytes(), Metrics) if file.is_file() else None) or {}
    return metrics.get(SCORE, Ranking().score(metrics))  # older versions ranked by the evaluation loss
