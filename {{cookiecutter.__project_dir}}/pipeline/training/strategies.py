"""How a model is spread over the ranks: what differs between DDP, FSDP and ZeRO, behind one interface."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from pipeline.training.dataset import Batch
from pipeline.training.options import TrainOptions
from pipeline.training.runtimes.runtime import Runtime, Write
from pipeline.training.schedule import BatchPlan

BETAS = (0.9, 0.95)  # the usual pair for language models: the second moment forgets within tens of steps


class Strategy(ABC):
    """A model and its optimizer, spread over the ranks."""

    module: nn.Module
    """What computes; calling it takes part in whatever the ranks must do together."""
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def accumulate(self, batch: Batch, scale: torch.Tensor, last: bool) -> torch.Tensor:
        """Add the gradient of `scale` x the summed loss of a micro-batch, averaged over the ranks after
        the `last` one of a step; returns the summed loss."""

    @abstractmethod
    def step(self, learning_rate: float) -> torch.Tensor | float:
        """Clip, update the parameters and forget the gradients; returns the norm before clipping."""

    @abstractmethod
    def capture(self) -> Write:
        """Copy this rank's part of the parameters and of the optimizer's state to main memory; returns what writes
        the copy."""

    @abstractmethod
    def load(self, folder: Path, world_size: int) -> None:
        """Read back what all ranks wrote, `world_size` of them."""

    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """Upper bound of what this rank writes."""

    @abstractmethod
    def gather(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, whole, on rank 0, and nothing elsewhere; a call that all ranks make."""

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy summed over the trained tokens. Label i is predicted from what precedes it.

        No attention mask: position_ids that restart keep packed documents apart.
        """
        return self.module(**batch, num_items_in_batch=1, use_cache=False).loss

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate


def copied(state: Any) -> Any:
    """`state` with a copy in main memory of each tensor in it, which training on does not change."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)


MakeStrategy = Callable[[PreTrainedModel, TrainOptions, Runtime, BatchPlan], Strategy]


def adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """The optimizer of every strategy. Only matrices decay: pulling norms and biases to 0 regularises nothing."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)


class DDP(Strategy):
    """Every rank holds the whole model and optimizer; gradients are averaged."""

    def __init__(self, model: PreTrainedModel, options: TrainOptions, run: Runtime, plan: BatchPlan) -> None:
        self.model = model
        self.module = run.wrap(model)
        self.optimizer = adamw(model, options.weight_decay)
        self._is_writer = run.rank == 0
        self._max_grad_norm = options.max_grad_norm
        self._bf16 = options.precision == "bf16"
        self._device = run.device.type

    def accumulate(self, batch: Batch, scale: torch.Tensor, last: bool) -> torch.Tensor:
        module = self.module
        wait = not last and isinstance(module, DistributedDataParallel)
        with module.no_sync() if wait else nullcontext():  # one all-reduce a step, not one a micro-batch
            loss = self.summed_loss(batch)
            (loss * scale).backward()
        return loss.detach()

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._bf16):
            return super().summed_loss(batch)

    def step(self, learning_rate: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.set_learning_rate(learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def capture(self) -> Write:
        if not self._is_writer:
            return lambda folder: None
        state = copied({"model": self.gather(), "optimizer": self.optimizer.state_dict()})
        return lambda folder: torch.save(state, folder / "ddp.pt")

    def load(self, folder: Path, world_size: int) -> None:
        state = torch.load(folder / "ddp.pt", map_location=self._device, weights_only=True)
        self.model.load_state_dict(state["model"], strict=False)  # frozen parameters are those of the base model
        self.optimizer.load_state_dict(state["optimizer"])

    def checkpoint_bytes(self) -> int:
        """fp32: the trained parameters and AdamW's two moments."""
        return 12 * self.model.num_parameters(only_trainable=True) if self._is_writer else 0

    def gather(self) -> dict[str, torch.Tensor]:
        if not self._is_writer:
            return {}
        return {
            name: parameter.detach() for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
