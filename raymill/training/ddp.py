"""DistributedDataParallel as a `Strategy`."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from raymill.training.dataset import Batch
from raymill.training.options import TrainOptions
from raymill.training.runtimes.runtime import Runtime, WriteCheckpoint
from raymill.training.schedule import BatchPlan
from raymill.training.strategy import StateCopier, Strategy
from raymill.training.weight_files import Weight


class DDP(Strategy):
    """DistributedDataParallel: every rank holds the full model and optimizer, and gradients are averaged."""

    def __init__(self, model: PreTrainedModel, options: TrainOptions, runtime: Runtime, plan: BatchPlan) -> None:
        self.model = model
        self.module = runtime.wrap(model)
        self._use_optimizer(model, options)
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
            self._scaled(loss, scale).backward()
        return loss.detach()

    def in_precision(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._bf16):
            return compute()

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
        """Return the bytes of the trained parameters and the optimizer's states in fp32. Only rank 0 writes them."""
        return self.state_bytes() * self.model.num_parameters(only_trainable=True) if self._is_writer else 0

    def gather(self) -> Iterator[Weight]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and self._is_writer:
                yield name, parameter.detach()
