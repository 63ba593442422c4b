"""Estimate what it takes to train and serve a model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig

from raymill.instance_types import InstanceType
from raymill.planner import memory, serving
from raymill.planner.memory import MAX_GPUS, Training, recommend
from raymill.planner.serving import Serving, kv_bytes
from raymill.planner.shape import Shape, shape_of
from raymill.training.options import OptimizerName


@dataclass(frozen=True)
class ModelPlan:
    """The estimates that report.py prints for a model."""

    shape: Shape
    training: Training
    """The training settings in settings.toml."""
    global_batch_rows: int
    types: tuple[InstanceType, ...]
    """The cluster's instance types for training, the preferred one first."""
    recommended: Training | None
    """The recommended settings on the preferred type. None if no method fits into the cluster's memory."""
    tokens: int | None
    """Tokens in the packed data. None if there is no packed data."""
    kv_bytes: int
    """Size of one token's keys and values, in bytes."""
    context: int
    """Tokens of all concurrent requests to a replica, if each has max_model_len tokens."""
    serving: Mapping[InstanceType, Serving]
    """How to serve the model on the smallest instance type with each model of GPU that holds it."""
    dollars_per_instance_hour: Mapping[str, float]
    """Maps an instance type to the hourly price of an instance. Empty if prices are unknown."""

    @property
    def instance(self) -> InstanceType:
        """The preferred instance type for training."""
        return self.types[0]

    @property
    def serving_instance(self) -> InstanceType | None:
        """The recommended instance type for serving, or None if the model fits on none."""
        return serving.cheapest(self.serving, self.dollars_per_instance_hour)

    def gpu_counts(self, instance: InstanceType) -> list[int]:
        """Return the numbers of GPUs to estimate for, which all split the global batch evenly."""
        rows = self.training.micro_batch_rows
        return [gpus for gpus in memory.gpu_counts(instance) if self.global_batch_rows % (gpus * rows) == 0]

    @property
    def job(self) -> str:
        """The recommended fine-tuning job, or "" if no method fits."""
        return self.recommended.method.job if self.recommended else ""

    @property
    def settings(self) -> dict[str, dict[str, int | bool | str]]:
        """The recommended values for settings.toml, by section and key."""
        found: dict[str, dict[str, int | bool | str]] = {}
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
        if instance := self.serving_instance:
            found["cluster.gpu"] = {"serve_instance_type": "" if self.types == (instance,) else instance.name}
            found["cluster.serve"] = {
                "tensor_parallel_size": self.serving[instance].tensor_parallel_size,
                "pipeline_parallel_size": self.serving[instance].pipeline_parallel_size,
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
    optimizer: OptimizerName,
    own_optimizers: tuple[tuple[str, float], ...],
    types: tuple[InstanceType, ...],
    max_instances: int,
    tokens: int | None,
    context: int,
    serving_width: int,
    serving_cpus: float,
    serving_types: Sequence[InstanceType],
    dollars_per_instance_hour: Callable[[Collection[str]], Mapping[str, float]],
) -> ModelPlan:
    """Return the plan for a model with this configuration.

    `own_optimizers` are those of `Training`. `serving_types` are those that the region offers.
    `dollars_per_instance_hour` returns the prices of the cluster's types and of those that it is asked for.

    Raises:
        UserError: the configuration is not that of a causal language model.
    """
    shape = shape_of(config)
    training = Training(
        sequence_length,
        micro_batch_rows,
        precision,
        chunked_loss=chunked_loss,
        checkpointing_interval=checkpointing_interval,
        optimizer=optimizer,
        own_optimizers=own_optimizers,
        gpus=num_workers,
        gpus_per_instance=types[0].gpus,
    )
    counts = memory.gpu_counts(types[0], min(MAX_GPUS, max_instances * types[0].gpus))
    served = serving.smallest(shape, serving_width, context, serving_cpus, serving_types)
    return ModelPlan(
        shape=shape,
        training=training,
        global_batch_rows=global_batch_rows,
        types=types,
        recommended=recommend(shape, training, types[0], counts, global_batch_rows),
        tokens=tokens,
        kv_bytes=kv_bytes(shape, serving_width),
        context=context,
        serving=served,
        dollars_per_instance_hour=dollars_per_instance_hour([one.name for one in served]),
    )
