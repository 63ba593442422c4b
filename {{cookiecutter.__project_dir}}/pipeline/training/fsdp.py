"""PyTorch's fully sharded data parallel over the same loop."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pipeline.training.dataset import Batch
from pipeline.training.models import decoder_layers
from pipeline.training.options import TrainOptions
from pipeline.training.runtimes.runtime import Runtime, Write
from pipeline.training.schedule import BatchPlan
from pipeline.training.strategies import Strategy, adamw, copied

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""What is saved: frozen parameters are those of the base model."""


class FSDP(Strategy):
    """Parameters, gradients and optimizer states sharded over the ranks, decoder layer by decoder layer: what one layer
    computes with is gathered before it and freed after it (Zhao et al. 2023, arXiv:2304.11277; torch's `fully_shard`).
    """

    def __init__(
        self, reshard_after_forward: bool, model: PreTrainedModel, options: TrainOptions, run: Runtime, plan: BatchPlan
    ) -> None:
        self.model = model
        mesh = init_device_mesh(run.device.type, (run.world_size,))
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        precision = bf16 if options.precision == "bf16" else MixedPrecisionPolicy()
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision)
        for layer in decoder_layers(model):  # each goes to the device and is sharded before the next one does
            shard(layer)
        self.module = self._sharded = shard(model)
        self.optimizer = adamw(model, options.weight_decay)
        self._max_grad_norm = options.max_grad_norm
        self._world_size = run.world_size
        self._writers = dist.new_group(backend="gloo")  # of the threads that write, beside what the loop says meanwhile

    def accumulate(self, batch: Batch, scale: torch.Tensor, last: bool) -> torch.Tensor:
        self._sharded.set_requires_gradient_sync(last)  # one reduce-scatter a step, not one a micro-batch
        loss = self.summed_loss(batch)
        (loss * scale).backward()
        return loss.detach()

    def step(self, learning_rate: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.set_learning_rate(learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def capture(self) -> Write:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=TRAINED)
        state = copied({"model": model, "optimizer": optimizer})
        return lambda folder: dcp.save(state, checkpoint_id=folder / "fsdp", process_group=self._writers)

    def load(self, folder: Path, world_size: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=TRAINED)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "fsdp")
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=TRAINED)

    def checkpoint_bytes(self) -> int:
        """fp32: this rank's share of the parameters and of AdamW's two moments."""
        return 12 * self.model.num_parameters(only_trainable=True) // self._world_size

    def gather(self) -> dict[str, torch.Tensor]:
        state = get_model_state_dict(self.model, options=replace(TRAINED, full_state_dict=True, cpu_offload=True))
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
