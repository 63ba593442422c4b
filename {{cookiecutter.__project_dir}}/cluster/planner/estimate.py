"""Estimate what it takes to train and serve a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig

from cluster.common.cluster_file import GPUS_PER_INSTANCE
from cluster.planner.memory import GPU_GIB, MAX_GPUS, Training, recommend
from cluster.planner.serving import Serving, kv_bytes, serve
from cluster.planner.shape import Shape, shape_of


@dataclass(frozen=True)
class ModelPlan:
    """The estimates that report.py prints for a model."""

    shape: Shape
    training: Training
    """The training settings in settings.toml."""
    gpu_counts: tuple[int, ...]
    """Numbers of GPUs to estimate for: part of one instance, or whole instances. All split the global batch evenly."""
    gpu_gib: int
    """Memory of each of the cluster's GPUs, in GiB."""
    recommended: Training | None
    """The recommended settings. None if no method fits into the cluster's memory."""
    tokens: int | None
    """Tokens in the packed data. None if there is no packed data."""
    kv_bytes: int
    """Size of one token's keys and values, in bytes."""
    context: int
    """Tokens of all concurrent requests to a replica, if each has max_model_len tokens."""
    serving: dict[int, Serving | None]
    """Maps a GPU's memory in GiB to how to serve the model, or to None if the model does not fit."""
    dollars_per_instance_hour: Mapping[int, float]
    """Maps a GPU's memory in GiB to the hourly price of an instance. Empty if prices are unknown."""

    @property
    def job(self) -> str:
        """The recommended fine-tuning job, or "" if no method fits."""
        if self.recommended is None:
            return ""
        method = self.recommended.method
        return "finetune_deepspeed" if method.zero_stage else "finetune_fsdp" if method.is_fsdp else "finetune_ddp"

    @property
    def settings(self) -> dict[str, dict[str, int | bool]]:
        """The recommended values for settings.toml, by section and key."""
        found: dict[str, dict[str, int | bool]] = {}
        if training := self.recommended:
            found["cluster.train"] = {
                "num_workers": training.gpus,
                "micro_batch_rows": training.micro_batch_rows,
                "gradient_checkpointing": training.gradient_checkpointing,
            }
            if training.method.zero_stage:
                found["cluster.deepspeed"] = {
                    "zero_stage": training.method.zero_stage,
                    "offload_optimizer": training.method.offload_optimizer,
                    "offload_parameters": training.method.offload_parameters,
                }
        if serving := self.serving[self.gpu_gib]:
            found["cluster.serve"] = {
                "tensor_parallel_size": serving.tensor_parallel_size,
                "pipeline_parallel_size": serving.pipeline_parallel_size,
            }
        return found


def estimate(
    config: PreTrainedConfig,
    *,
    sequence_length: int,
    micro_batch_rows: int,
    global_batch_rows: int,
    num_workers: int,
    precision: Literal["fp32", "bf16"],
    chunked_loss: bool,
    checkpointing_interval: int,
    gpu_gib: int,
    max_instances: int,
    tokens: int | None,
    context: int,
    serving_width: int,
    dollars_per_instance_hour: Mapping[int, float],
) -> ModelPlan:
    """Return the plan for a model with this configuration.

    Raises:
        settings.UserError: the configuration is not that of a causal language model.
    """
    shape = shape_of(config)
    training = Training(
        sequence_length,
        micro_batch_rows,
        precision,
        chunked_loss=chunked_loss,
        checkpointing_interval=checkpointing_interval,
        gpus=num_workers,
    )
    counts = (*range(1, GPUS_PER_INSTANCE), *range(GPUS_PER_INSTANCE, MAX_GPUS + 1, GPUS_PER_INSTANCE))
    available = tuple(gpus for gpus in counts if gpus <= max_instances * GPUS_PER_INSTANCE)
    return ModelPlan(
        shape=shape,
        training=training,
        gpu_counts=tuple(gpus for gpus in counts if global_batch_rows % (gpus * micro_batch_rows) == 0),
        gpu_gib=gpu_gib,
        recommended=recommend(shape, training, gpu_gib, available, global_batch_rows),
        tokens=tokens,
        kv_bytes=kv_bytes(shape, serving_width),
        context=context,
        serving={gib: serve(shape, serving_width, context, gib) for gib in GPU_GIB},
        dollars_per_instance_hour=dollars_per_instance_hour,
    )
