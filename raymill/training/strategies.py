"""The `Strategy` interface, which hides how DDP, FSDP and ZeRO distribute a model over the ranks. Also contains DDP."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from raymill.errors import UserError
from raymill.training.collectives import is_equal
from raymill.training.dataset import Batch
from raymill.training.options import TrainOptions
from raymill.training.packed_attention import model_inputs
from raymill.training.parameters import shape_of
from raymill.training.runtimes.runtime import Runtime, WriteCheckpoint
from raymill.training.schedule import BatchPlan, learning_rate_at, peak_learning_rate
from raymill.training.weight_files import Weight

BETAS = (0.9, 0.95)  # usual for language models: 0.95 averages squared gradients over about 20 steps


class Strategy(ABC):
    """A model and its optimizer, distributed over the ranks."""

    module: nn.Module
    """The module to call. It runs the collectives that the strategy needs."""
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    bounds_loss = True
    """Whether a loss above twice that of a uniform guess means that training has diverged. Set it to False
    for a loss with larger values."""
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
        """Return the summed loss of a micro-batch, and add the gradient of `scale` x this loss to the gradients.

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
        """Return the loss summed over the trained tokens of `batch`, by default the cross-entropy.

        Label i is predicted from the tokens before it. The evaluation during training uses this loss too.
        """
        # with num_items_in_batch=1, the model returns the sum instead of the mean
        return self.module(**model_inputs(self.model, batch), num_items_in_batch=1, use_cache=False).loss

    def make_optimizer(self, model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
        """Return the optimizer of the trained parameters, by default AdamW."""
        return adamw(model, options.weight_decay)

    @staticmethod
    def learning_rate(options: TrainOptions, step: int) -> float:
        """Return the learning rate of a step, which counts from 1. By default: warmup, then a cosine."""
        return learning_rate_at(
            step,
            peak=peak_learning_rate(options.learning_rate, options.global_batch_rows, options.reference_batch_rows),
            warmup_steps=options.warmup_steps,
            steps=options.steps,
            min_ratio=options.min_lr_ratio,
        )

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """Return `loss` in the precision of the strategy."""
        return self.loss(batch)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
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


def adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW. Weight decay applies only to matrices, not to biases and norms."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if len(shape_of(parameter)) >= 2]
    vectors = [parameter for parameter in trained if len(shape_of(parameter)) < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)


class DDP(Strategy):
    """DistributedDataParallel: every rank holds the full model and optimizer, and gradients are averaged."""

    def __init__(self, model: PreTrainedModel, options: TrainOptions, runtime: Runtime, plan: BatchPlan) -> None:
        self.model = model
        self.module = runtime.wrap(model)
        self.optimizer = self.make_optimizer(model, options)
        self._is_writer = runtime.rank == 0
        self._max_grad_norm = options.max_grad_norm
        self._bf16 = options.precision == "bf16"
        self._device = runtime.device.type
        self._copier = StateCopier()

    def accumulate(self, batch: Batch, scale: torch.Tensor, last: bool) -> torch.Tensor:
        module = self.module
        is_local = not last and isinstance(module, DistributedDataParallel)
        with module.no_sync() if is_local else nullcontext():  # one all-reduce per step, not per micro-batch
            loss = self.summed_loss(batch)
            (loss * scale).backward()
        return loss.detach()

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """Return `loss` in the precision of the options."""
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._bf16):
            return super().summed_loss(batch)

    def step(self, learning_rate: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.set_learning_rate(learning_rate)
        self.optimizer.step()
        # gradients are views of DDP's buckets: None would free no memory, and `no_sync` would allocate new gradients
        self.optimizer.zero_grad(set_to_none=False)
        return norm

    def capture(self) -> WriteCheckpoint:
        if not self._is_writer:
            return lambda folder: None
        state = self._copier.copy({"model": dict(self.gather()), "optimizer": self.optimizer.state_dict()})
        return lambda folder: torch.save(state, folder / "ddp.pt")

    def load(self, folder: Path, world_size: int) -> None:
        state = torch.load(folder / "ddp.pt", map_location=self._device, weights_only=True)
        self.model.load_state_dict(state["model"], strict=False)  # frozen parameters are not saved
        self.optimizer.load_state_dict(state["optimizer"])

    def checkpoint_bytes(self) -> int:
        """Return the bytes of the trained parameters and AdamW's two moments in fp32. Only rank 0 writes them."""
        return 12 * self.model.num_parameters(only_trainable=True) if self._is_writer else 0

    def gather(self) -> Iterator[Weight]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and self._is_writer:
                yield name, parameter.detach()
