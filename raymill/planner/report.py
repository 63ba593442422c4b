"""Print a plan: tables of memory, time and price, and the recommended settings."""

import json
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from raymill.planner.estimate import ModelPlan
from raymill.planner.memory import (
    GATHER_WITHIN_INSTANCES,
    GIB,
    METHODS,
    MFU,
    USABLE,
    Training,
    activations,
    fewest,
    fits,
    hours,
    peak,
    states,
)
from raymill.planner.shape import LORA_RANK
from raymill.settings import inv


def show(plan: ModelPlan, console: Console) -> None:
    """Print the tables, their assumptions, and the recommendation."""
    shape = plan.shape
    others = f" and {shape.untrained:,} that text does not reach" if shape.untrained else ""
    console.print(f"{shape.parameters:,} parameters{others}, {shape.layers} layers of {shape.hidden}\n")
    console.print(_training_table(plan))
    hours_note = f"Hours and dollars need packed data. Run: {inv('submit preprocess')}"
    if plan.tokens is not None:
        hours_note = (
            f"Hours are for one pass over the {plan.tokens:,} tokens of the packed data, on whole instances, with each "
            f"GPU at {MFU:.0%} of its bf16 peak"
        )
    console.print(
        f'Columns from "checkpointing" onward assume gradient checkpointing. {hours_note}. The plan fills at most '
        f"{USABLE:.0%} of GPU and main memory. LoRA means --lora-rank {LORA_RANK}. The recommendation is for full "
        "fine-tuning with DDP, FSDP or DeepSpeed.\n"
    )
    console.print(_activation_table(plan), "", _serving_table(plan), "", sep="\n")
    console.print(f"Train with {_training_advice(plan)}. {_serving_advice(plan)}.", soft_wrap=True, markup=False)


def _training_table(plan: ModelPlan) -> Table:
    training = plan.training
    batch = f"{training.micro_batch_rows} × {training.sequence_length} tokens per micro-batch"
    table = _table(
        f"Training on {training.gpus} GPUs, {batch}: GiB per GPU, and GiB of main memory per instance",
        *("", "states", "total", "checkpointing", "main memory"),
        *(f"fewest {one.gpu}" for one in plan.types),
        *("hours", "dollars"),
    )
    methods = METHODS if training.gpus == training.instance_gpus else (*METHODS, *GATHER_WITHIN_INSTANCES)
    for lora in (False, True):
        for method in methods:
            name = f"{'LoRA' if lora else 'full'}, {method.name}"
            table.add_row(name, *_training_cells(plan, replace(training, method=method, lora=lora)))
    return table


def _training_cells(plan: ModelPlan, training: Training) -> Iterator[str]:
    shape, checkpointed = plan.shape, replace(training, gradient_checkpointing=True)
    yield _gib(states(shape, training).gpu)
    yield _gib(peak(shape, training).gpu)
    yield _gib(peak(shape, checkpointed).gpu)
    yield _gib(peak(shape, checkpointed).host * training.instance_gpus)
    needed = [fewest(shape, checkpointed, one, plan.gpu_counts(one)) for one in plan.types]
    yield from (str(gpus or "—") for gpus in needed)
    costs: tuple[float | None, ...] = (None, None)
    if needed[0]:
        whole_instances = plan.instance.instances(needed[0]) * plan.instance.gpus
        costs = _costs(plan, replace(checkpointed, gpus=whole_instances))
    yield from ("—" if cost is None else f"{cost:,.1f}" for cost in costs)


def _activation_table(plan: ModelPlan) -> Table:
    training = replace(plan.training, method=METHODS[1])
    lengths = [training.sequence_length * factor for factor in (1, 2, 4)]
    title = "Activations with ZeRO, without / with gradient checkpointing: GiB per GPU"
    table = _table(title, "rows", *(f"{length} tokens" for length in lengths))
    for rows in (training.micro_batch_rows * factor for factor in (1, 2, 4)):
        sizes = [replace(training, sequence_length=length, micro_batch_rows=rows) for length in lengths]
        both = [(size, replace(size, gradient_checkpointing=True)) for size in sizes]
        table.add_row(
            str(rows), *(" / ".join(_gib(activations(plan.shape, one).peak) for one in pair) for pair in both)
        )
    return table


def _serving_table(plan: ModelPlan) -> Table:
    table = _table(
        f"Serving {plan.context:,} tokens at once, with {plan.kv_bytes / 1024:,.0f} KiB of keys and values per token",
        *("instances", "GPU", "weights, GiB per GPU", "tensor_parallel_size", "pipeline_parallel_size"),
        *("room for tokens", "dollars per hour"),
    )
    for one, serving in plan.serving.items():
        instances = one.instances(serving.gpus)
        price = plan.dollars_per_instance_hour.get(one.name)
        table.add_row(
            *(f"{instances} × {one.name}", str(one.gpu), _gib(serving.weights)),
            *(str(serving.tensor_parallel_size), str(serving.pipeline_parallel_size), f"{serving.cache_tokens:,}"),
            "—" if price is None else f"{instances * price:,.2f}",
        )
    return table


def _training_advice(plan: ModelPlan) -> str:
    if plan.recommended is None:
        return (
            f"a smaller model, more instances or larger GPUs (max_workers and InstanceType in cluster/cluster.yaml), "
            f"because full fine-tuning does not fit on this cluster's GPUs: {plan.instance}"
        )
    units = zip(_costs(plan, plan.recommended), ("hours", "dollars"), strict=True)
    costs = "".join(f", {cost:,.1f} {unit}" for cost, unit in units if cost is not None)
    keys = _keys(plan, "cluster.train", "cluster.deepspeed")
    return f"{inv('submit', plan.job)} and {keys}{costs}{_network_advice(plan.recommended, plan)}"


def _network_advice(training: Training, plan: ModelPlan) -> str:
    """Return a phrase that names the setting that keeps gathered parameters within each instance, if it fits."""
    method = training.method
    within = [
        other
        for other in GATHER_WITHIN_INSTANCES
        if (other.is_fsdp, other.zero_stage) == (method.is_fsdp, method.zero_stage)
        and not method.offload_optimizer
        and training.gpus > training.instance_gpus
        and fits(plan.shape, replace(training, method=other), plan.instance)
    ]
    return "".join(
        ". To gather parameters only within each instance, also set "
        f"{'hybrid_shard = true in [fsdp]' if other.is_fsdp else 'hpz = true in [deepspeed]'}, which fits too"
        for other in within
    )


def _serving_advice(plan: ModelPlan) -> str:
    if "cluster.serve" not in plan.settings:
        return "To serve it, lower max_model_len or target_ongoing_requests in [cluster.serve]"
    return f"Serve on {plan.serving_instance} with {_keys(plan, 'cluster.gpu', 'cluster.serve')}"


def _keys(plan: ModelPlan, *sections: str) -> str:
    """Return the recommended settings of these sections as text, such as "num_workers = 8 in [cluster.train]"."""
    parts = []
    for section in sections:
        if keys := plan.settings.get(section):
            parts.append(", ".join(f"{key} = {json.dumps(value)}" for key, value in keys.items()) + f" in [{section}]")
    return ", ".join(parts)


def _costs(plan: ModelPlan, training: Training) -> tuple[float | None, float | None]:
    """Return how many hours training takes, and how many dollars it costs. Unknown values are None."""
    taken = hours(plan.shape, training, plan.tokens, plan.instance.gpu)
    price = plan.dollars_per_instance_hour.get(plan.instance.name)
    return taken, None if taken is None or price is None else taken * plan.instance.instances(training.gpus) * price


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column(first, header_style="dim")
    for column in columns:
        table.add_column(column, header_style="dim", justify="right")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
