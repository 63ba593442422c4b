"""`inv plan MODEL`: what a model takes to be trained and served, before anything is rented. It starts nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig

import settings
from cluster.common import cluster_file
from cluster.common.cluster_file import GPUS_A_MACHINE
from cluster.planner.memory import (
    CARDS_GIB,
    GIB,
    LORA_RANK,
    METHODS,
    MFU,
    MOST_GPUS,
    USABLE,
    Serving,
    Shape,
    Training,
    activations,
    fewest,
    hours,
    kv_bytes,
    peak,
    recommend,
    serve,
    shape_of,
    states,
)
from pipeline.ray_support import model_cache
from pipeline.training import preflight
from pipeline.training.dataset import read_manifest
from pipeline.training.options import DDPOptions


@dataclass(frozen=True)
class Plan:
    """Everything that `show` prints."""

    shape: Shape
    training: Training
    """As settings.toml has it."""
    gpu_counts: tuple[int, ...]
    """Numbers of GPUs that divide the global batch, on one machine or on whole ones."""
    card_gib: int
    """Of the cluster's machines."""
    recommended: Training | None
    """None where nothing fits the cluster."""
    tokens: int | None
    """Of the packed data; None without any."""
    kv_bytes: int
    """For each token of a served context."""
    context: int
    """Tokens of all requests that a replica is meant for, each of max_model_len."""
    serving: dict[int, Serving | None]
    """By GiB of the card."""
    dollars_per_machine_hour: Mapping[int, float]
    """By GiB of the card; without those that are not known."""


def plan(model: str, console: Console, dollars_per_machine_hour: Mapping[int, float] | None = None) -> None:
    """Print the plan for a model under the cluster's settings; prices are by GiB of an A100, 40 or 80.

    Raises:
        UserError: the model cannot be loaded, or a setting is wrong.
    """
    from pipeline.data.options import PreprocessOptions
    from pipeline.serving.options import ServeOptions

    train = settings.load(DDPOptions, "train", profile="cluster")
    serving = settings.load(ServeOptions, "serve", profile="cluster")
    machines = cluster_file.load()
    made = estimate(
        preflight.load_config(model_cache.find(model)),
        sequence_length=settings.load(PreprocessOptions, "preprocess", profile="cluster").sequence_length,
        micro_batch_rows=train.micro_batch_rows,
        global_batch_rows=train.global_batch_rows,
        num_workers=train.max_workers,
        precision=train.precision,
        card_gib=80 if any("p4de" in worker.instance_type for worker in machines.workers) else 40,
        most_machines=machines.most_workers,
        tokens=_tokens(settings.resolve(train.data)),
        context=serving.target_ongoing_requests * serving.max_model_len,
        serving_width=4 if serving.dtype == "float32" else 2,
        dollars_per_machine_hour=dollars_per_machine_hour or {},
    )
    show(made, console)


def estimate(
    config: PreTrainedConfig,
    *,
    sequence_length: int,
    micro_batch_rows: int,
    global_batch_rows: int,
    num_workers: int,
    precision: Literal["fp32", "bf16"],
    card_gib: int,
    most_machines: int,
    tokens: int | None,
    context: int,
    serving_width: int,
    dollars_per_machine_hour: Mapping[int, float],
) -> Plan:
    """The plan for a model with this configuration, on `most_machines` with cards of `card_gib`.

    Raises:
        UserError: the configuration is not of a causal language model.
    """
    shape = shape_of(config)
    training = Training(sequence_length, micro_batch_rows, precision, gpus=num_workers)
    counts = (*range(1, GPUS_A_MACHINE), *range(GPUS_A_MACHINE, MOST_GPUS + 1, GPUS_A_MACHINE))
    counts = tuple(gpus for gpus in counts if global_batch_rows % (gpus * micro_batch_rows) == 0)
    there = tuple(gpus for gpus in counts if gpus <= most_machines * GPUS_A_MACHINE)
    return Plan(
        shape=shape,
        training=training,
        gpu_counts=counts,
        card_gib=card_gib,
        recommended=recommend(shape, training, card_gib, there),
        tokens=tokens,
        kv_bytes=kv_bytes(shape, serving_width),
        context=context,
        serving={card: serve(shape, serving_width, context, card) for card in CARDS_GIB},
        dollars_per_machine_hour=dollars_per_machine_hour,
    )


def _tokens(data: str) -> int | None:
    try:
        manifest = read_manifest(data)
    except settings.UserError:
        return None
    return manifest.train.rows * manifest.sequence_length


def show(plan: Plan, console: Console) -> None:
    """Print the tables, what they assume, and the recommendation."""
    shape = plan.shape
    console.print(f"{shape.parameters:,} parameters, {shape.layers} layers of {shape.hidden}\n")
    console.print(_training_table(plan))
    data = "of the data set, which is not there: make it with inv submit preprocess"
    if plan.tokens is not None:
        data = f"of one pass over the data set's {plan.tokens:,} tokens"
    console.print(
        f"The last four columns are with checkpointing. Hours are {data}, on whole machines at {MFU:.0%} of an "
        f"A100's bf16 peak. Cards are filled to {USABLE:.0%}. LoRA is --lora-rank {LORA_RANK}; the "
        "advice is for full fine-tuning, by DDP or DeepSpeed.\n"
    )
    console.print(_activation_table(plan), "", _serving_table(plan), "", sep="\n")
    console.print(f"Train with {_training_advice(plan)}. {_serving_advice(plan)}.", soft_wrap=True, markup=False)


def _training_table(plan: Plan) -> Table:
    training = plan.training
    batch = f"{training.micro_batch_rows} × {training.sequence_length} tokens at once"
    table = _table(
        f"Training on {training.gpus} GPUs, {batch}: GiB on a GPU, and of main memory on a machine",
        *("", "states", "all", "checkpointing", "main memory", "fewest 40 GB", "fewest 80 GB", "hours", "dollars"),
    )
    for lora in (False, True):
        for method in METHODS:
            name = f"{'LoRA' if lora else 'full'}, {method.name}"
            table.add_row(name, *_training_cells(plan, replace(training, method=method, lora=lora)))
    return table


def _training_cells(plan: Plan, training: Training) -> Iterator[str]:
    shape, saving = plan.shape, replace(training, gradient_checkpointing=True)
    yield _gib(states(shape, training).gpu)
    yield _gib(peak(shape, training).gpu)
    yield _gib(peak(shape, saving).gpu)
    yield _gib(peak(shape, saving).host * min(training.gpus, GPUS_A_MACHINE))
    for card in CARDS_GIB:
        yield str(fewest(shape, saving, card, plan.gpu_counts) or "—")
    needed = fewest(shape, saving, plan.card_gib, plan.gpu_counts)
    costs = _costs(plan, replace(saving, gpus=replace(saving, gpus=needed).machines * GPUS_A_MACHINE)) if needed else ()
    yield from ("—" if cost is None else f"{cost:,.1f}" for cost in costs or (None, None))


def _activation_table(plan: Plan) -> Table:
    training = replace(plan.training, method=METHODS[1])
    lengths = [training.sequence_length * factor for factor in (1, 2, 4)]
    title = "Activations under ZeRO, without and with gradient checkpointing: GiB on a GPU"
    table = _table(title, "rows", *(f"{length} tokens" for length in lengths))
    for rows in (training.micro_batch_rows * factor for factor in (1, 2, 4)):
        sizes = [replace(training, sequence_length=length, micro_batch_rows=rows) for length in lengths]
        both = [(size, replace(size, gradient_checkpointing=True)) for size in sizes]
        table.add_row(str(rows), *(" / ".join(_gib(activations(plan.shape, one)) for one in pair) for pair in both))
    return table


def _serving_table(plan: Plan) -> Table:
    table = _table(
        f"Serving {plan.context:,} tokens at once, {plan.kv_bytes / 1024:,.0f} KiB of keys and values each",
        *("card", "weights, GiB on a GPU", "tensor_parallel_size", "pipeline_parallel_size", "room, tokens"),
    )
    for card, serving in plan.serving.items():
        cells = ["—"] * 4
        if serving:
            sizes = serving.tensor_parallel_size, serving.pipeline_parallel_size
            cells = [_gib(serving.weights), *map(str, sizes), f"{serving.room:,}"]
        table.add_row(f"{card} GB", *cells)
    return table


def _training_advice(plan: Plan) -> str:
    training = plan.recommended
    if training is None:
        return (
            f"a smaller model, more machines or larger cards (max_workers and InstanceType in cluster/cluster.yaml): "
            f"no full fine-tuning fits this cluster's {plan.card_gib} GB cards"
        )
    units = zip(_costs(plan, training), ("hours", "dollars"), strict=True)
    costs = "".join(f", {cost:,.1f} {unit}" for cost, unit in units if cost is not None)
    values = f"num_workers = {training.gpus}, gradient_checkpointing = {str(training.gradient_checkpointing).lower()}"
    method = training.method
    if not method.zero_stage:
        return f"inv submit finetune_ddp and {values} in [cluster.train]{costs}"
    offload = f"offload_optimizer = {method.offload_optimizer}, offload_parameters = {method.offload_parameters}"
    sharding = f"zero_stage = {method.zero_stage}, {offload.lower()} in [cluster.deepspeed]"
    return f"inv submit finetune_deepspeed and {values} in [cluster.train], {sharding}{costs}"


def _serving_advice(plan: Plan) -> str:
    serving = plan.serving[plan.card_gib]
    if serving is None:
        return "To serve it, lower max_model_len or target_ongoing_requests in [cluster.serve]"
    sizes = f"tensor_parallel_size = {serving.tensor_parallel_size}"
    return f"Serve with {sizes}, pipeline_parallel_size = {serving.pipeline_parallel_size} in [cluster.serve]"


def _costs(plan: Plan, training: Training) -> tuple[float | None, float | None]:
    """Hours and dollars; None where unknown."""
    taken = hours(plan.shape, training, plan.tokens)
    price = plan.dollars_per_machine_hour.get(plan.card_gib)
    return taken, None if taken is None or price is None else taken * training.machines * price


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column(first, header_style="dim")
    for column in columns:
        table.add_column(column, header_style="dim", justify="right")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
