"""Estimate how much memory and time it takes to train a model.

Sizes are in bytes, per GPU unless stated otherwise. The formulas are for dense transformers. For a mixture of
experts, they count the activations of only one expert per token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raymill.instance_types import Gpu, InstanceType
from raymill.planner.shape import LORA_RANK, Shape
from raymill.training import optimizers
from raymill.training.chunked_loss import CHUNK
from raymill.training.flops import flops_per_token
from raymill.training.options import OPTIMIZER_JOBS, OptimizerName

GIB = 2**30
USABLE = 0.9  # share of memory to fill; CUDA's context, NCCL's buffers and fragmentation take the rest
MAX_GPUS = 128  # largest number of GPUs to try
MFU = 0.4  # assumed share of a GPU's bf16 peak; a run logs its measured share as `mfu` in metrics.jsonl
# Tokens per micro-batch. The plan tries no larger ones: with FSDP and ZeRO-3, communication already takes only 19 % as
# long as computation, whatever the model, if NCCL within one instance reaches 200 GB/s and the GPUs half their peak.
ENOUGH_TOKENS = 4096
BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size, which it always allocates in full
OTHER = GIB // 4  # what no formula counts; `inv fit` measured up to 0.2 GiB for models with 36 layers or fewer
# The same for each layer of deeper models. torch does not split a block if less than 1 MiB of it would remain.
OTHER_PER_LAYER = 8 * 2**20
LINEARS = 7  # linear layers in a Llama block, and so its LoRA adapters
LIVE = 1_000_000_000  # elements; DeepSpeed's default for stage3_max_live_parameters and sub_group_size


@dataclass(frozen=True)
class Method:
    """A way to distribute training. `zero_stage` and the offload options are settings in [deepspeed]."""

    name: str
    zero_stage: int = 0
    """0 means DDP or FSDP."""
    is_fsdp: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    hybrid_shard: bool = False
    """Setting in [fsdp]: shard over the GPUs of one instance, not over all GPUs."""
    hpz: bool = False
    """Setting in [deepspeed]: keep a second copy of the parameters, sharded over the GPUs of one instance."""

    @property
    def job(self) -> str:
        """The fine-tuning job with this method."""
        return "finetune_deepspeed" if self.zero_stage else "finetune_fsdp" if self.is_fsdp else "finetune_ddp"


DDP = Method("DDP")
# fastest first: more sharding needs more communication, and offloading to main memory is slower still
METHODS = (
    DDP,
    Method("ZeRO-1", 1),
    Method("ZeRO-2", 2),
    Method("ZeRO-3", 3),
    Method("FSDP", is_fsdp=True),
    Method("ZeRO-2, offload", 2, offload_optimizer=True),
    Method("ZeRO-3, offload", 3, offload_optimizer=True),
    Method("ZeRO-3, offload all", 3, offload_optimizer=True, offload_parameters=True),
)
# On several instances, these gather parameters within each instance. The recommendation does not try them, because
# their effect on speed has not been measured.
GATHER_WITHIN_INSTANCES = (
    Method("FSDP, hybrid_shard", is_fsdp=True, hybrid_shard=True),
    Method("ZeRO-3, hpz", 3, hpz=True),
)


@dataclass(frozen=True)
class Training:
    """Settings of a training run that determine its memory and time."""

    sequence_length: int
    micro_batch_rows: int
    precision: Literal["fp32", "bf16"] = "bf16"
    gradient_checkpointing: bool = False
    method: Method = DDP
    lora: bool = False
    chunked_loss: bool = False
    checkpointing_interval: int = 1
    """With gradient checkpointing, one in this many blocks keeps only its input."""
    gpus: int = 1
    gpus_per_instance: int = 8
    optimizer: OptimizerName = "adamw"
    own_optimizers: tuple[tuple[str, float], ...] = ()
    """Pairs of a job and the numbers that an optimizer of its own keeps for each parameter:
    `Strategy.optimizer_values`."""

    @property
    def width(self) -> int:
        """Bytes per number in the computation."""
        return 2 if self.precision == "bf16" else 4

    def optimizer_bytes(self, shape: Shape) -> float:
        """Return the bytes per trained parameter that the optimizer keeps."""
        matrices = 1.0 if self.lora else 1 - (shape.embeddings + shape.experts) / shape.parameters
        return 4 * dict(self.own_optimizers).get(self.method.job, optimizers.kept_values(self.optimizer, matrices))

    @property
    def instance_gpus(self) -> int:
        """Number of GPUs on each instance that take part."""
        return min(self.gpus, self.gpus_per_instance)

    @property
    def shards(self) -> int:
        """Number of GPUs over which the training state is sharded, if it is."""
        return self.instance_gpus if self.method.hybrid_shard else self.gpus


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs on its GPU and in main memory."""

    gpu: float
    host: float


def states(shape: Shape, training: Training) -> Memory:
    """Return the size of parameters, gradients and the optimizer's states after a backward pass.

    - DDP: parameters stay in fp32, even with autocast. Each takes 4 bytes, its gradient 4, and AdamW's two moments 8.
      Another optimizer says how many numbers it keeps.
    - FSDP: the same, sharded over the ranks, or with `hybrid_shard` over those of an instance.
    - DeepSpeed: parameters are in the format of the computation, called the working format here. So are gradients in
      stage 1; stages 2 and 3 add them up in fp32. An fp32 master copy and the optimizer's states are sharded over the
      ranks.
    - hpZ: on several instances, a second copy of the parameters is sharded over the ranks of an instance.
    - Offloaded optimizer: main memory holds the gradients twice in fp32, for the update and for adding up
      micro-batches. With stage 2, it also holds a copy of the rank's share of the updated parameters, and
      both the GPU and main memory reserve room for the largest gradient.
    - LoRA: frozen parameters are in the working format.
    - Composite models: what text does not reach is frozen, but without LoRA and DeepSpeed it stays in fp32.

    Sources: ZeRO, Rajbhandari et al. 2019, arXiv:1910.02054, section 3; ZeRO-Offload, Ren et al. 2021,
    arXiv:2101.06840, section 4. ZeRO++, Wang et al. 2023, arXiv:2306.10209, section 4.2.
    """
    method, width, optimizer = training.method, training.width, training.optimizer_bytes(shape)
    trained, frozen = (shape.adapters, shape.parameters) if training.lora else (shape.parameters, 0)
    frozen += shape.untrained
    share = trained / training.shards
    if not method.zero_stage:
        frozen_width = width if training.lora else 4
        return Memory(
            (frozen_width * frozen + (8 + optimizer) * trained) / (training.shards if method.is_fsdp else 1), 0
        )
    parameters = width * (frozen + trained) / (training.gpus if method.zero_stage == 3 else 1)
    if method.hpz and training.gpus > training.instance_gpus:
        parameters += width * (frozen + trained) / training.instance_gpus
    if not method.offload_optimizer:
        gradients = width * trained if method.zero_stage == 1 else 4 * share
        return Memory(parameters + gradients + (4 + optimizer) * share, 0)
    host = (12 + optimizer) * share
    if method.zero_stage < 3:
        largest = 0 if training.lora else width * shape.largest
        return Memory(parameters + largest, host + width * share + largest)
    return Memory(0, host + parameters) if method.offload_parameters else Memory(parameters, host)


@dataclass(frozen=True)
class Activations:
    """Bytes of activations during a micro-batch."""

    kept: float
    """What the forward pass keeps for the backward pass."""
    block: float
    """What else the backward pass of one block needs."""
    logits: float
    """The logits and their gradient, which are freed before the backward pass of any block."""

    @property
    def peak(self) -> float:
        return self.kept + max(self.block, self.logits)


def activations(shape: Shape, training: Training) -> Activations:
    """Return the size of activations during a micro-batch.

    Counts what each operation keeps for its backward pass, as in Korthikanti et al. 2022, arXiv:2205.05198, section 4.
    Their formula, 34 s b h, is for GPT with dropout. The one here is for Llama blocks of the transformers library. For
    each token, a block keeps in the working format:

    - each norm's output, and its normalized input unless the norm's weights are frozen. It keeps the input in fp32.
      With autocast, it keeps the normalized input of the block's two norms in fp32, and a copy of a norm's output for
      each linear layer that reads it.
    - queries, keys, values and the output of attention. Attention itself is fused: FlashAttention keeps one fp32 number
      per head. With masks, keys and values are repeated for each head, and there is a row of the mask.
    - four tensors of the feed-forward layer
    - with LoRA, the output of each adapter's first matrix, and with autocast another copy of the output of attention

    The backward pass of a block temporarily needs another third of the memory that the block keeps. With
    checkpointing, each block keeps only its input, and one block at a time is recomputed (section 5). Four tensors have
    the size of the logits: the logits in the working format and in fp32, their probabilities, and their gradient.

    A mixture of experts also keeps the input and the output of each expert that processes a token. With LoRA, peft
    computes the adapted weights of all experts in a block, and keeps them. `inv fit` measured that the backward pass of
    a block needs up to 6 times their size with autocast, and up to 1.25 times with ZeRO.
    """
    width, lora = training.width, training.lora
    autocast = training.precision == "bf16" and not (training.method.zero_stage or training.method.is_fsdp)
    normalized = 0 if lora else 4 if autocast else width
    block = (2 * (4 + normalized) + (5 if autocast else 2) * width) * shape.hidden
    block += (4 + (0 if lora else width)) * shape.normed_heads
    if shape.has_varlen and training.precision == "bf16":
        block += width * 2 * (shape.query + shape.key) + 4 * shape.heads
    else:
        block += width * (4 * shape.query + training.sequence_length)
    block += width * shape.query if lora and autocast else 0
    block += width * (4 * shape.intermediate + 2 * shape.chosen_experts * shape.hidden)
    block += width * LORA_RANK * LINEARS if lora else 0
    block_input = 4 if autocast and not lora else width
    tokens = training.sequence_length * training.micro_batch_rows
    adapted = width * shape.experts / shape.layers if lora else 0
    if training.gradient_checkpointing:
        checkpointed = math.ceil(shape.layers / training.checkpointing_interval)
        extra, extra_adapted = 4 / 3, 2 * adapted
    else:
        checkpointed = 0
        extra, extra_adapted = 1 / 3, adapted
    extra_adapted += (6 if autocast else 1.25 if training.method.zero_stage else 0) * adapted
    kept = checkpointed * tokens * block_input * shape.hidden
    kept += (shape.layers - checkpointed) * (tokens * block + adapted)
    return Activations(
        kept,
        tokens * extra * block + extra_adapted,
        _logits(shape, training, tokens),
    )


def _logits(shape: Shape, training: Training, tokens: int) -> float:
    """Return the size of the logits and of what is computed from them.

    At once: the logits in the working format and in fp32, their probabilities, and their gradient. In chunks: the
    logits of a chunk in fp32 and their gradient in the working format, and the gradient of the output layer.
    """
    if not (training.chunked_loss and shape.has_chunks):
        return tokens * 12 * shape.vocabulary
    chunk = min(tokens, CHUNK.batch_chunk_size or tokens)
    gradient = 0 if training.lora else training.width * shape.vocabulary * shape.hidden
    return gradient + chunk * (4 + training.width) * shape.vocabulary


def peak(shape: Shape, training: Training) -> Memory:
    """Return the peak memory, which is reached at the start, in a backward pass, or in the optimizer's step.

    - Start: with FSDP and ZeRO-3, each rank loads only its share. Otherwise, it loads all weights into main memory, in
      fp32 unless they are frozen. DeepSpeed then moves them to the GPU in the working format, and copies the trained
      ones into one tensor.
    - DDP: autocast caches the parameters in bf16 during a pass. In the second step, DDP reorders its buckets, and
      meanwhile holds the gradients twice.
    - FSDP: see `_fsdp_peak`.
    - ZeRO: stages 1 and 2 fill one bucket while another is reduced. Stage 2 allocates them when the first gradient is
      ready, which is after the logits are freed. Stage 3 has one bucket, in fp32, gathers up to LIVE parameters and one
      more block, and holds the gradient of a block's largest weight. When the first bucket is full, stages 2 and 3
      convert it to fp32 for the reduction, and the activations of its parameters are already free. Stage 2 reduces a
      gradient that exceeds the bucket by itself, and the gradient of a tied embedding last. In the optimizer's step,
      stage 1 casts gradients to fp32, and stages 2 and 3 still hold their buckets. Stage 3 also casts the updated
      parameters, LIVE at a time.
    - Checkpoints: main memory holds an fp32 copy of the rank's share of trained parameters and moments; with DDP, only
      on rank 0. Offloaded states are not copied.
    - Offloading: stage 2 still adds up the rank's share of the gradients on the GPU. Stage 3 updates LIVE parameters at
      a time. Main memory for gradients and for offloaded parameters is pinned.
    """
    method, width, held = training.method, training.width, states(shape, training)
    trained = shape.adapters if training.lora else shape.parameters
    share, bucket = trained / training.shards, min(BUCKET, trained)
    passing = activations(shape, training)
    start, buffers, reduction = 0.0, 0.0, 0.0
    if not method.zero_stage:
        step = 4 * trained
        if training.precision == "bf16" and not training.lora:
            buffers = 2 * shape.multiplied
    elif method.zero_stage == 1:
        buffers, step = 2 * width * BUCKET, 4 * share
    else:
        remaining = passing.kept * (1 - bucket / trained) + passing.block
        if method.zero_stage == 2:
            buffers, buckets = 4 * share if method.offload_optimizer else 0, 2 * width * BUCKET
            complete = trained if training.lora or not shape.is_tied else trained - shape.largest
            converted = max(8 * min(bucket, complete), 0 if training.lora else 6 * shape.largest)
            reduction, step = buckets + max(converted + remaining, passing.kept + passing.block), buffers + buckets
        else:
            layer = (shape.parameters - shape.embeddings) / shape.layers
            gathered = LIVE + layer + shape.hidden * shape.intermediate
            buffers = 4 * BUCKET + width * min(gathered, shape.parameters)
            reduction, step = 6 * bucket + remaining, 4 * BUCKET + (4 + width) * min(LIVE, share)
    if method.zero_stage in (1, 2):
        start = 2 * width * trained + width * (shape.untrained + (shape.parameters if training.lora else 0))
    copied = share if method.zero_stage or method.is_fsdp else trained
    host = (4 + training.optimizer_bytes(shape)) * copied
    if method.offload_optimizer:
        step, host = 0, held.host + _pinning(shape, training)
        if method.zero_stage == 3 and not method.offload_parameters:
            host += width * min(LIVE, share)
    used = max(buffers + passing.peak, buffers + reduction, step)
    if method.is_fsdp:
        used = _fsdp_peak(shape, training, passing)
    gpu = max(start, held.gpu + used) + max(OTHER, OTHER_PER_LAYER * shape.layers)
    return Memory(gpu, max((2 if training.lora else 4) * _loaded(shape, training), host) + OTHER)


def _fsdp_peak(shape: Shape, training: Training, passing: Activations) -> float:
    """Return the peak of what FSDP needs on the GPU in addition to the states.

    While a block computes, the next one is gathered. When the gradients of a block or of the output layer are reduced,
    they exist in the working format and in fp32. When the output layer is gathered, its weights exist twice, and the
    last block's buffer is not yet freed. A tied output layer stays gathered during the entire pass.
    """
    width = training.width
    block = (shape.parameters - shape.embeddings) / shape.layers
    output = shape.vocabulary * shape.hidden
    loss = passing.logits + (1 if shape.is_tied else 2) * width * output
    backward = passing.block + 2 * width * block + shape.is_tied * width * output
    reduction = 0.0
    if not training.lora:
        backward += (width + 4) * block
        reduction = (width + 4) * output
    if shape.is_tied:  # its gradient is complete, and is reduced, only after the last activation is freed
        return max(passing.kept + max(loss, backward), reduction)
    gathering = 2 * width * output + width * block
    return passing.kept + max(loss, backward, gathering, reduction + 2 * width * block)


def _loaded(shape: Shape, training: Training) -> float:
    """Return the number of parameters that a rank loads into its main memory."""
    sharded = training.method.is_fsdp or training.method.zero_stage == 3
    parameters = shape.parameters + shape.untrained
    return parameters / training.shards if sharded else parameters


def _pinning(shape: Shape, training: Training) -> float:
    """Return how many bytes pinning adds: torch rounds the size of each pinned buffer up to a power of two.

    DeepSpeed pins the offloaded parameters as one buffer, and another copy of the embedding and of the output layer.
    """
    share = (shape.adapters if training.lora else shape.parameters) / training.gpus
    buffers, copies = [4 * share], 0.0
    if training.method.zero_stage == 3:
        buffers += [4.0 * LIVE] * int(share // LIVE) + [4 * (share % LIVE)]
    if training.method.offload_parameters:
        buffers.append(training.width * (shape.parameters + shape.untrained) / training.gpus)
        copies = shape.embeddings / shape.largest * _pinned(training.width * shape.largest / training.gpus)
    return sum(_pinned(size) - size for size in buffers) + copies


def _pinned(size: float) -> float:
    return 2 ** math.ceil(math.log2(size)) if size else 0


def fits(shape: Shape, training: Training, instance: InstanceType) -> bool:
    """Return whether training fits into the memory of each GPU and of each instance, and has its optimizer there."""
    if training.method.job not in OPTIMIZER_JOBS.get(training.optimizer, {training.method.job}):
        return False
    training = replace(training, gpus_per_instance=instance.gpus)
    needed = peak(shape, training)
    main_memory = training.instance_gpus * needed.host
    return needed.gpu <= USABLE * instance.gpu.gib * GIB and main_memory <= USABLE * instance.memory_gib * GIB


def gpu_counts(instance: InstanceType, most: int = MAX_GPUS) -> tuple[int, ...]:
    """Return the numbers of GPUs to try: part of one instance, or whole instances with up to `most` GPUs."""
    return (*range(1, instance.gpus), *range(instance.gpus, most + 1, instance.gpus))


def fewest(shape: Shape, training: Training, instance: InstanceType, counts: Sequence[int]) -> int | None:
    """Return the first of the `counts` of GPUs that training fits on, or None if it fits on none of them."""
    return next((gpus for gpus in counts if fits(shape, replace(training, gpus=gpus), instance)), None)


def recommend(
    shape: Shape, training: Training, instance: InstanceType, counts: Sequence[int], global_batch_rows: int
) -> Training | None:
    """Return the recommended settings, or None if no method fits on any of the `counts` of GPUs.

    The order of preference is: no offloading, fewer instances, more of their GPUs, more rows in a micro-batch up to
    ENOUGH_TOKENS, no gradient checkpointing, less sharding. Checkpointing adds a third more operations. Offloading is
    slower still.
    """
    for offload in (False, True):
        for gpus in sorted(counts, key=lambda gpus: (instance.instances(gpus), -gpus)):
            for rows in _micro_batches(training.sequence_length, gpus, global_batch_rows):
                for checkpointing in (False, True):
                    for method in METHODS:
                        tried = replace(
                            training,
                            gpus=gpus,
                            micro_batch_rows=rows,
                            gradient_checkpointing=checkpointing,
                            method=method,
                        )
                        if method.offload_optimizer == offload and fits(shape, tried, instance):
                            return tried
    return None


def _micro_batches(sequence_length: int, gpus: int, global_batch_rows: int) -> list[int]:
    """Return the numbers of rows to try: powers of two that split the global batch evenly, the largest first."""
    rows = [2**power for power in range(max(1, ENOUGH_TOKENS // sequence_length).bit_length())]
    return [number for number in reversed(rows) if global_batch_rows % (gpus * number) == 0]


def hours(shape: Shape, training: Training, tokens: int | None, gpu: Gpu) -> float | None:
    """Return how many hours one pass over `tokens` tokens takes on these GPUs, or None if that is unknown.

    The time is unknown without `tokens`, and with an offloaded optimizer, because its speed depends on the host. The
    formula for the operations per token is from PaLM (arXiv:2204.02311, appendix B). LoRA needs two thirds of the
    operations, because frozen weights need no gradients. Checkpointing repeats the forward pass, which is a third of
    the operations (arXiv:2205.05198, section 5).
    """
    if tokens is None or training.method.offload_optimizer:
        return None
    operations = flops_per_token(shape.compute, training.sequence_length)
    thirds = (2 if training.lora else 3) + training.gradient_checkpointing / training.checkpointing_interval
    return tokens * operations * thirds / 3 / (training.gpus * gpu.bf16_flops * MFU) / 3600
