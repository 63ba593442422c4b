"""PyTorch's Fully Sharded Data Parallel (FSDP2) as a `Strategy`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from raymill.training import composite
from raymill.training.checkpoint_check import FSDP_FOLDER
from raymill.training.chunked_loss import uses_chunks
from raymill.training.dataset import Batch
from raymill.training.model_io import decoder_layers
from raymill.training.options import FSDPOptions
from raymill.training.runtimes.runtime import Runtime, WriteCheckpoint
from raymill.training.schedule import BatchPlan
from raymill.training.strategy import StateCopier, Strategy, ranks_per_machine
from raymill.training.weight_files import Weight

SHARD = "fsdp"  # name of the mesh's dimension to shard over; peft knows this name, and gives adapters the full width
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Save and load only the trained parameters, because the base model already has the frozen ones."""


class FSDP(Strategy):
    """Shards parameters, gradients and optimizer states over the ranks.

    The parameters of a decoder layer are gathered before the layer runs, and by default freed afterwards
    (Zhao et al. 2023, arXiv:2304.11277; torch's `fully_shard`).
    """

    @classmethod
    @contextmanager
    def loading(cls, options: FSDPOptions, runtime: Runtime, plan: BatchPlan) -> Iterator[None]:
        """Make `from_pretrained` read only this rank's rows of each parameter. The parameters become DTensors."""
        if options.quantize_base:  # bitsandbytes quantizes whole weights, a quarter of the size, which are then sharded
            yield
            return
        load, mesh = PreTrainedModel._load_pretrained_model, _mesh(options, runtime)

        def load_shards(model: PreTrainedModel, *arguments: Any) -> Any:
            _shard(model, mesh)
            return load(model, *arguments)

        PreTrainedModel._load_pretrained_model = staticmethod(load_shards)
        try:
            yield
        finally:
            PreTrainedModel._load_pretrained_model = staticmethod(load)

    def __init__(self, model: PreTrainedModel, options: FSDPOptions, runtime: Runtime, plan: BatchPlan) -> None:
        self.model = model
        mesh = _mesh(options, runtime)
        shards = _detach_shards(model, mesh)
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        precision = bf16 if options.precision == "bf16" else MixedPrecisionPolicy()
        reshard = options.reshard_after_forward
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
        # one by one, so that a pass gathers the parameters of only one module at a time
        embedding, output = _embedding_and_output(model, options)
        for module in (*decoder_layers(model), *embedding):
            shard(module)
        for module in output:
            shard(module, reshard_after_forward=False)  # the backward pass begins with it
        self.module = self._root = shard(model)
        model.load_state_dict(shards, strict=False, assign=True)
        self._use_optimizer(model, options)
        self._max_grad_norm = options.max_grad_norm
        self._world_size = runtime.world_size
        self._is_writer = runtime.rank == 0
        self._copier = StateCopier()
        self.copies_state = options.optimizer != "adamw_8bit"  # torch's stager cannot copy torchao's tensors
        # the threads that write checkpoints need a separate process group
        self._writers = dist.new_group(backend="gloo")

    def accumulate(self, batch: Batch, scale: torch.Tensor, last: bool) -> torch.Tensor:
        # Gradients are reduced and sharded after every micro-batch, not only after the last. Otherwise each rank would
        # hold all gradients in fp32. With 8 billion parameters on 8 ranks, a rank's state takes 15 GiB, not 42 GiB.
        self._root.set_requires_all_reduce(last)  # sum the gradients of replicas only once per optimizer step
        loss = self.summed_loss(batch)
        self._scaled(loss, scale).backward()
        return loss.detach()

    def step(self, learning_rate: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.set_learning_rate(learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def capture(self) -> WriteCheckpoint:
        self._reshard()
        model, optimizer = get_state_dict(self.model, self.optimizer, options=TRAINED)
        state = {"model": model, "optimizer": optimizer}
        if self.copies_state:
            state = self._copier.copy(state)
        # no fsync, which waits for the disk: an incomplete checkpoint is skipped anyway
        return lambda folder: dcp.save(
            state,
            storage_writer=FileSystemWriter(folder / FSDP_FOLDER, sync_files=False),
            process_group=self._writers,
        )

    def load(self, folder: Path, world_size: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=TRAINED)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder / FSDP_FOLDER)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=TRAINED)

    def checkpoint_bytes(self) -> int:
        """Return the number of bytes of this rank's share of the parameters and the optimizer's states, all in fp32.

        Replicas share the writing.
        """
        return self.state_bytes() * self.model.num_parameters(only_trainable=True) // self._world_size

    def gather(self) -> Iterator[Weight]:
        self._reshard()
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                whole = parameter.full_tensor().detach()
                if self._is_writer:
                    yield name, whole.cpu()

    def _reshard(self) -> None:
        """Free gathered parameters. Without `reshard_after_forward`, an evaluation leaves the model gathered."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _embedding_and_output(model: PreTrainedModel, options: FSDPOptions) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the embedding and the output layer as lists, which are empty if something else uses the layer's weights.

    Tied weights belong to both layers. Liger's loss reads the weight of the output layer without calling the layer.
    """
    embedding, output = model.get_input_embeddings(), composite.output_layer(model)
    if embedding.weight is output.weight:
        return [], []
    return [embedding], [] if options.liger and not uses_chunks(model) else [output]


def _mesh(options: FSDPOptions, runtime: Runtime) -> DeviceMesh:
    """Return the ranks as one dimension to shard over. With `hybrid_shard`, another dimension holds the replicas."""
    shards = ranks_per_machine(runtime) if options.hybrid_shard else runtime.world_size
    return _device_mesh(runtime.device.type, runtime.world_size // shards, shards)


@cache  # so that `loading` and the strategy share the mesh's process groups
def _device_mesh(device: str, replicas: int, shards: int) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(device, (shards,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", SHARD))


def _shard(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard a model that is on the meta device. Parameters keep only the rows that `fully_shard` gives to this rank.

    transformers then reads only these rows. If the rows do not divide evenly, the first ranks get more.
    """
    for module in model.modules():
        for name, whole in module.named_parameters(recurse=False):
            rows = distribute_tensor(whole.detach(), mesh[SHARD], [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(rows, whole.requires_grad))


def _detach_shards(model: PreTrainedModel, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Replace each shard with a full parameter on the meta device, and return the shards by name, placed on `mesh`.

    If the model kept its shards, `fully_shard` would shard them again.
    """
    shards = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor)
    }
    whole, placed = {}, {}
    for shard in shards.values():
        meta = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
        whole[id(shard)] = nn.Parameter(meta, shard.requires_grad)
        placed[id(shard)] = _place(shard, mesh)
    for name, shard in shards.items():
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module).register_parameter(attribute, whole[id(shard)])
    return {name: placed[id(shard)] for name, shard in shards.items()}


def _place(shard: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a shard as part of a parameter that is replicated over all dimensions of `mesh` but the last.

    A shard that is a view of the full tensor is copied, because the view would keep the full tensor in memory. On a
    CPU, transformers loads such views if the file already has the data type to load.
    """
    local = shard.to_local().detach()
    if local.untyped_storage().nbytes() != local.nbytes:
        local = local.clone()
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    placed = DTensor.from_local(local, mesh, placements, shape=shard.shape, stride=shard.stride())
    return nn.Parameter(placed, shard.requires_grad)
