"""Where a training runs: the small port through which the loop sees Ray Train, one process, or another launcher."""

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

Metrics = dict[str, float]
"""Named numbers of one step."""


class Run(Protocol):
    """What the loop asks of its surroundings. Every rank makes the same calls in the same order."""

    rank: int
    world_size: int

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """`model` on the device, its gradients averaged over the ranks."""
        ...

    def report(self, metrics: Metrics, checkpoint: Path) -> None:
        """Keep this rank's part of a checkpoint, a folder that may be deleted afterwards."""
        ...

    def resume_from(self) -> AbstractContextManager[Path | None]:
        """The last checkpoint with the parts of all ranks, or None at the start of a run."""
        ...

    def should_stop(self) -> bool:
        """Whether this rank was asked to end early, with a checkpoint."""
        ...


class OneProcess:
    """A run in this process alone; whoever holds it sets `stop` to end it early."""

    rank = 0
    world_size = 1

    def __init__(self, folder: Path, device: torch.device, keep_checkpoints: int) -> None:
        self.device = device
        self.stop = False
        self._folder = folder
        self._keep = keep_checkpoints

    def wrap(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def report(self, metrics: Metrics, checkpoint: Path) -> None:
        (checkpoint / "metrics.json").write_text(json.dumps(metrics))
        shutil.move(checkpoint, self._folder / f"step-{metrics['step']:08d}")
        last, *others = self._newest_first()
        for folder in sorted([last, *others], key=_evaluation_loss)[self._keep :]:
            if folder != last:
                shutil.rmtree(folder)

    @contextmanager
    def resume_from(self) -> Iterator[Path | None]:
        yield next(iter(self._newest_first()), None)

    def should_stop(self) -> bool:
        return self.stop

    def _newest_first(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"), reverse=True)


def _evaluation_loss(checkpoint: Path) -> float:
    """Equal where nothing was evaluated: the newest are kept then."""
    return json.loads((checkpoint / "metrics.json").read_text()).get("eval_loss", 0.0)
