"""Where a training runs: the small port through which the loop sees Ray Train, one process, or another launcher."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

METRICS = "metrics.json"
"""Of the step after which a checkpoint was made, in its folder."""

Metrics = dict[str, float]
"""Named numbers of one step."""

Write = Callable[[Path], None]
"""Writes this rank's part of a checkpoint into an empty folder of its own; the state was copied before, so another
thread may call it while the loop trains on."""


class Runtime(Protocol):
    """What the loop asks of its surroundings. Every rank makes the same calls in the same order."""

    rank: int
    world_size: int

    @property
    def scratch(self) -> Path | None:
        """Where this rank writes its part of a checkpoint first; None where that is the run's own folder."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """`model` on the device, its gradients averaged over the ranks."""
        ...

    def report(self, metrics: Metrics, write: Write) -> None:
        """Begin to keep a checkpoint of all ranks; it counts as one when it is whole."""
        ...

    def wait(self) -> None:
        """Return when what was reported is kept."""
        ...

    def checkpoints(self) -> Iterator[Path]:
        """The checkpoints that are kept, newest first, each a folder with the parts of all ranks."""
        ...

    def should_stop(self) -> bool:
        """Whether this rank was asked to end early, with a checkpoint."""
        ...

    def should_save(self) -> bool:
        """Whether a machine of the run is about to go: a checkpoint is due now."""
        ...


class SingleProcess:
    """A run in this process alone; whoever holds it sets `stop` to end it early."""

    rank = 0
    world_size = 1
    scratch = None

    def __init__(self, folder: Path, device: torch.device, keep_checkpoints: int) -> None:
        self.device = device
        self.stop = False
        self._folder = folder
        self._number_kept = keep_checkpoints
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        for partial in folder.glob(".step-*"):  # what a kill left
            shutil.rmtree(partial, ignore_errors=True)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def report(self, metrics: Metrics, write: Write) -> None:
        self._pending = self._writer.submit(self._keep, metrics, write)

    def wait(self) -> None:
        if self._pending:
            self._pending.result()

    def checkpoints(self) -> Iterator[Path]:
        yield from sorted(self._folder.glob("step-*"), reverse=True)

    def should_stop(self) -> bool:
        return self.stop

    def should_save(self) -> bool:
        return False

    def _keep(self, metrics: Metrics, write: Write) -> None:
        partial = self._folder / f".step-{metrics['step']:08d}"
        partial.mkdir(parents=True)
        write(partial)
        self._publish(partial, metrics)

    def _publish(self, partial: Path, metrics: Metrics) -> None:
        """Give a folder that is whole its name, and delete what is no more among the best."""
        (partial / METRICS).write_text(json.dumps(metrics))
        folder = partial.with_name(partial.name.removeprefix("."))
        shutil.rmtree(folder, ignore_errors=True)  # one that was found torn
        partial.rename(folder)
        last, *others = self.checkpoints()
        for folder in sorted([last, *others], key=_evaluation_loss)[self._number_kept :]:
            if folder != last:
                shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}")))  # killed here, it is none any more


def _evaluation_loss(checkpoint: Path) -> float:
    """Equal where nothing was evaluated: the newest are kept then."""
    return json.loads((checkpoint / METRICS).read_text()).get("eval_loss", math.inf)
