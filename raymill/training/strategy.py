"""The `Strategy` interface, which hides how DDP, FSDP and ZeRO distribute a model over the ranks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import PreTrainedModel

from raymill.errors import UserError
from raymill.training import optimizers
from raymill.training.collectives import is_equal, total
from raymill.training.dataset import Batch
from raymill.training.objectives import Objective, Supervised
from raymill.training.objectives_by_name import OBJECTIVES
from raymill.training.options import TrainOptions
from raymill.training.runtimes.runtime import Runtime, WriteCheckpoint
from raymill.training.schedule import BatchPlan, learning_rate_at, peak_learning_rate
from raymill.training.weight_files import Weight


class Strategy(ABC):
    """A model and its optimizer, distributed over the ranks."""

    module: nn.Module
    """The module to call. It runs the collectives that the strategy needs."""
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    kept_values: float
    """`optimizer_values` of this model."""
    objective: Objective = Supervised()
    """The trainer sets it to what `make_objective` returns."""
    bounds_loss = True
    """Whether a loss above twice that of a uniform guess means that training has diverged. Set it to False
    for a loss with larger values."""
    optimizer_values: float | None = None
    """Numbers in fp32 that the optimizer keeps for each trained parameter. A run whose optimizer keeps more is refused,
    because `inv plan` and the check of free disk space rely on it. None: those of the optimizer in the options."""
    copies_state = True
    """Whether `capture` copies the state. If not, training must wait until the checkpoint is written."""

    @classmethod
    def loading(cls, options: Any, runtime: Runtime, plan: BatchPlan) -> AbstractContextManager[None]:
        """Return a context in which `from_pretrained` loads what a rank needs of a model. By default: all of it."""
        return nullcontext()

    @abstractmethod
    def __init__(self, model: PreTrainedModel, options: Any, runtime: Runtime, plan: BatchPlan) -> None:
        """Distribute a model that was loaded in the context of `loading`. `options` are those of the job."""

    @abstractmethod
    def accumulate(self, batch: Batch, scale: torch.Tensor, last: bool) -> torch.Tensor:
        """Return `summed_loss` of a micro-batch, and add the gradient of `scale` x its terms to the gradients.

        `scale` has one element for each term of the loss.

        `last` marks the last micro-batch of an optimizer step. After that, the gradients are averages over the ranks.
        """

    @abstractmethod
    def step(self, learning_rate: float) -> torch.Tensor | float:
        """Clip the gradients, update the parameters and reset the gradients. Return the norm before clipping."""

    @abstractmethod
    def capture(self) -> WriteCheckpoint:
        """Return a function that writes this rank's part of the parameters and optimizer states.

        If `copies_state`, this method copies the state to main memory, and the function writes the copy.
        """

    @abstractmethod
    def load(self, folder: Path, world_size: int) -> None:
        """Load a checkpoint that `world_size` ranks wrote."""

    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """Return an upper bound on the number of bytes that this rank writes."""

    @abstractmethod
    def gather(self) -> Iterator[Weight]:
        """Yield the full trained parameters on rank 0, one at a time, and nothing on the other ranks.

        All ranks must iterate to the end.
        """

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the sums of the objective: by default, the cross-entropy summed over the trained tokens of `batch`.

        Label i is predicted from the tokens before it. The evaluation during training uses this loss too.
        """
        return self.objective.sums(self.module, self.model, batch)

    @staticmethod
    def make_objective(options: TrainOptions) -> Objective:
        """Return what training minimizes, by default the objective in the options."""
        return OBJECTIVES[options.objective](options)

    def make_optimizer(self, model: PreTrainedModel, options: TrainOptions) -> torch.optim.Optimizer:
        """Return the optimizer of the trained parameters, by default that in the options."""
        return optimizers.make(model, options.optimizer, options.weight_decay)

    @staticmethod
    def learning_rate(options: TrainOptions, step: int) -> float:
        """Return the learning rate of a step, which counts from 1. By default: warmup, then the schedule."""
        return learning_rate_at(
            step,
            peak=peak_learning_rate(options.learning_rate, options.global_batch_rows, options.reference_batch_rows),
            warmup_steps=options.warmup_steps,
            steps=options.steps,
            min_ratio=options.min_lr_ratio,
            schedule=options.schedule,
            decay_share=options.decay_share,
        )

    def _use_optimizer(self, model: PreTrainedModel, options: TrainOptions) -> None:
        self.optimizer = self.make_optimizer(model, options)
        by_name = optimizers.kept_values(options.optimizer, optimizers.matrix_share(model))
        self.kept_values = by_name if self.optimizer_values is None else self.optimizer_values

    def state_bytes(self) -> int:
        """Return the bytes that a checkpoint has for each trained parameter: its fp32 value, and the optimizer's."""
        return math.ceil(4 * (1 + self.kept_values))

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """Return `loss` in the precision of the strategy, as a vector."""
        sums = self.in_precision(lambda: self.loss(batch)).reshape(-1)
        if len(sums) != self.objective.size:
            raise UserError(
                f"loss of {type(self).__name__} returns {len(sums)} numbers, but its objective has "
                f"{self.objective.size}. Return them, or change `losses` of the objective: docs/preference.md."
            )
        return sums

    @torch.no_grad()
    def set_baseline(self, batches: Iterable[Batch]) -> None:
        """Set the baseline of the objective, if it has one, from all micro-batches. All ranks must call this."""
        if not self.objective.has_baseline:
            return
        self.module.eval()
        sums = [
            self.in_precision(
                lambda batch=batch: self.objective.baseline_sums(self.module, self.model, batch)  # type: ignore[misc]
            ).double()
            for batch in batches
        ]
        self.module.train()
        found, count = total(torch.stack(sums).sum(0))
        self.objective.baseline = (found / count.clamp(min=1)).float()

    def _scaled(self, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the loss to minimize, of the terms at the beginning of `summed_loss`."""
        return (loss[: scale.numel()] * scale).sum()

    def in_precision(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of a forward pass in the precision of the strategy."""
        return compute()

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            if torch.is_tensor(group["lr"]):  # in optimizers that compile their steps
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate


class StateCopier:
    """Copies states to main memory, where training does not change them.

    Each copy reuses the memory of the previous copy. If there is a GPU, this memory is pinned, which makes copying
    several times faster.
    """

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        copied = self._stager.stage(state)
        assert isinstance(copied, dict)  # asynchronous staging would return a future
        return copied


MakeStrategy = type[Strategy]


def ranks_per_machine(runtime: Runtime) -> int:
    """Return the number of ranks on each machine.

    Raises:
        UserError: the machines have different numbers of ranks. All ranks raise it.
    """
    if not is_equal(runtime.local_world_size, runtime.device):
        raise UserError(
            "the machines have different numbers of workers, but hybrid_shard and hpz need the same number on each. "
            "Set num_workers to a multiple of a machine's GPUs, or set the option to false."
        )
    return runtime.local_world_size
