"""What a model takes: bytes and operations of its training and serving, from its shape.

Sizes are in bytes, of one GPU unless said otherwise. The formulas are for dense transformers: of a mixture of experts,
hours are counted as if every expert worked on every token, and activations as if one did.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

import settings
from cluster.common.cluster_file import GPUS_A_MACHINE
from pipeline.training.flops import PEAK_BF16_FLOPS, flops_per_token

GIB = 2**30
CARDS_GIB = (40, 80)
USABLE = 0.9  # of a card: the rest is CUDA's context, NCCL's buffers and what fragmentation wastes
HOST_GIB = 1152  # main memory of p4d.24xlarge and p4de.24xlarge
MOST_GPUS = 128  # where the search for the fewest ends
MFU = 0.4  # assumed share of an A100's bf16 peak; `mfu` in metrics.jsonl is what a run reaches
LORA_RANK = 16
BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size, allocated whole whatever the model's size
LIVE = 1_000_000_000  # elements; DeepSpeed's defaults stage3_max_live_parameters and sub_group_size
SERVING_GIB = 2  # vLLM's activations and CUDA graphs


@dataclass(frozen=True)
class Shape:
    """What the formulas take of a model: numbers of elements."""

    parameters: int
    """All of them; tied ones once."""
    multiplied: int
    """Those that a token is multiplied by: all but an input embedding, which is looked up."""
    largest: int
    """Those of the largest tensor."""
    adapters: int
    """Those of LoRA adapters of rank LORA_RANK on every linear layer of the blocks."""
    layers: int
    heads: int
    hidden: int
    query: int
    """A token's queries in one block; of its keys, and of its values, there may be fewer."""
    key: int
    normed_heads: int
    """Queries and keys where the block normalizes them, as Qwen3's do; else 0."""
    intermediate: int
    """Width of the feed-forward layer."""
    vocabulary: int


@dataclass(frozen=True)
class Method:
    """One way of spreading a training; the fields are those of [deepspeed]."""

    name: str
    zero_stage: int = 0
    """0 is DDP."""
    offload_optimizer: bool = False
    offload_parameters: bool = False


DDP = Method("DDP")
# in the order of their speed: what is sharded more is sent more, and main memory is slower than all of that
METHODS = (
    DDP,
    Method("ZeRO-1", 1),
    Method("ZeRO-2", 2),
    Method("ZeRO-3", 3),
    Method("ZeRO-2, offload", 2, True),
    Method("ZeRO-3, offload", 3, True),
    Method("ZeRO-3, offload all", 3, True, True),
)


@dataclass(frozen=True)
class Training:
    """How something is trained."""

    sequence_length: int
    micro_batch_rows: int
    precision: Literal["fp32", "bf16"] = "bf16"
    gradient_checkpointing: bool = False
    method: Method = DDP
    lora: bool = False
    gpus: int = 1

    @property
    def width(self) -> int:
        """Bytes of a number in the computation."""
        return 2 if self.precision == "bf16" else 4

    @property
    def machines(self) -> int:
        return -(-self.gpus // GPUS_A_MACHINE)


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU of one rank, and in main memory for that rank."""

    gpu: float
    host: float


@dataclass(frozen=True)
class Serving:
    """How a model is spread over GPUs to answer."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    weights: float
    room: int
    """Tokens whose keys and values fit all these GPUs together."""


def shape_of(config: PreTrainedConfig) -> Shape:
    """Build the model without memory, on torch's meta device, and count it.

    Raises:
        UserError: the configuration is not of a causal language model.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError:
        reason = f"{config.model_type} is no causal language model"
        raise settings.UserError(f"{reason} that transformers knows; name another: inv plan MODEL") from None
    text = config.get_text_config()
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    query, key = heads * head, (getattr(text, "num_key_value_heads", None) or heads) * head
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not output]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return Shape(
        parameters=sum(sizes.values()),
        multiplied=sum(sizes.values()) - (0 if output.weight is embedding.weight else embedding.weight.numel()),
        largest=max(sizes.values()),
        adapters=sum(LORA_RANK * (linear.in_features + linear.out_features) for linear in linears),
        layers=text.num_hidden_layers,
        heads=heads,
        hidden=text.hidden_size,
        query=query,
        key=key,
        normed_heads=query + key if any(name.endswith("q_norm.weight") for name in sizes) else 0,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
    )


# ------------------------------------------------------------------------------------------ training


def states(shape: Shape, training: Training) -> Memory:
    """Parameters, gradients and AdamW's states, after a backward pass.

    ZeRO, Rajbhandari et al. 2019, arXiv:1910.02054, section 3, and ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840,
    section 4, with what this project's loop holds: DDP computes by autocast on fp32 parameters, 4 + 4 + 8 bytes each;
    DeepSpeed has a working copy in the computation's format and gradients in the same, and shares a fp32 master copy
    and AdamW's two moments out over the ranks. An offloaded optimizer has its gradients in main memory, in fp32 for
    the update and in the working format to add up micro-batches; stage 2 has a copy of its share of the parameters
    on their way back, and on either side room for the largest gradient. What LoRA freezes is fp32 with DDP, and
    in the working format alone with DeepSpeed.
    """
    method, width = training.method, training.width
    trained, frozen = (shape.adapters, shape.parameters) if training.lora else (shape.parameters, 0)
    share = trained / training.gpus
    if not method.zero_stage:
        return Memory(4 * frozen + 16 * trained, 0)
    parameters = width * (frozen + trained) / (training.gpus if method.zero_stage == 3 else 1)
    if not method.offload_optimizer:
        gradients = width * (trained if method.zero_stage == 1 else share)
        return Memory(parameters + gradients + 12 * share, 0)
    host = (16 + width) * share
    if method.zero_stage < 3:
        waiting = 0 if training.lora else width * shape.largest
        return Memory(parameters + waiting, host + width * share + waiting)
    return Memory(0, host + parameters) if method.offload_parameters else Memory(parameters, host)


def activations(shape: Shape, training: Training) -> float:
    """The most of activations at any time of a micro-batch.

    By the method of Korthikanti et al. 2022, arXiv:2205.05198, section 4: what each operation keeps for its backward
    pass. Their 34 s b h is of GPT with dropout; these are of transformers' Llama blocks with fused attention, which
    keeps no s x s matrix: for each token the norms' inputs and outputs, queries, keys (repeated for each head),
    values and the result of attention, and four tensors of the feed-forward layer. The last block's backward pass
    needs a third of a block more. With checkpointing each block keeps its input, and one at a time is recomputed
    (section 5). Logits are there in the working format, in fp32 and as probabilities, and with their gradient.
    """
    if training.precision == "fp32":
        hidden, normed_head, attention, feed_forward, kept = 24, 12, 24, 16, 4
    elif training.method.zero_stage:
        hidden, normed_head, attention, feed_forward, kept = 16, 8, 12, 8, 2
    else:  # autocast: what goes from block to block stays fp32, and each linear layer casts its input for itself
        hidden, normed_head, attention, feed_forward, kept = 26, 10, 12, 8, 4
    block = hidden * shape.hidden + normed_head * shape.normed_heads
    block += attention * shape.query + feed_forward * shape.intermediate
    logits = 12 * shape.vocabulary
    if training.gradient_checkpointing:
        token = shape.layers * kept * shape.hidden + max(logits, 4 / 3 * block)
    else:
        token = shape.layers * block + max(logits, block / 3)
    return token * training.sequence_length * training.micro_batch_rows


def peak(shape: Shape, training: Training) -> Memory:
    """The most at any time: at the start, in a backward pass, or in the optimizer's step.

    Start: the loop loads fp32 into main memory, and DeepSpeed moves the whole working copy to each GPU before stage 3
    shards it. Backward: DDP's autocast caches the parameters in bf16; stages 1 and 2 fill one bucket while another is
    reduced; stage 3 has one, and gathers up to LIVE parameters. Step: AdamW's square roots in fp32, of a stage 3 for
    LIVE parameters at a time; DeepSpeed casts as many gradients to fp32, and a CPU has a quotient beside them.
    """
    method, width, held = training.method, training.width, states(shape, training)
    trained = shape.adapters if training.lora else shape.parameters
    share = trained / training.gpus
    if not method.zero_stage:
        start, step = 0, 4 * trained
        buffers = 2 * shape.multiplied if training.precision == "bf16" and not training.lora else 0
    elif method.zero_stage < 3:
        start, step, buffers = width * shape.parameters, 8 * share, 2 * width * BUCKET
    else:
        start, step = width * shape.parameters, 8 * min(LIVE, share)
        buffers = width * (BUCKET + min(LIVE, shape.parameters))
    step, host_step = (0, step) if method.offload_optimizer else (step, 0)
    gpu = max(start, held.gpu + max(buffers + activations(shape, training), step))
    return Memory(gpu, max((2 if training.lora else 4) * shape.parameters, held.host + host_step))


def fits(shape: Shape, training: Training, card_gib: int) -> bool:
    """Whether each GPU and each machine holds its part."""
    needed = peak(shape, training)
    ranks = min(training.gpus, GPUS_A_MACHINE)
    return needed.gpu <= USABLE * card_gib * GIB and ranks * needed.host <= USABLE * HOST_GIB * GIB


def fewest(shape: Shape, training: Training, card_gib: int, gpu_counts: tuple[int, ...]) -> int | None:
    """The smallest of those numbers of GPUs that holds the training."""
    return next((gpus for gpus in gpu_counts if fits(shape, replace(training, gpus=gpus), card_gib)), None)


def recommend(shape: Shape, training: Training, card_gib: int, gpu_counts: tuple[int, ...]) -> Training | None:
    """The fewest machines of those counts, all their GPUs, and on them the fastest method that fits.

    Recomputation costs a third more operations, more than what sharding sends; offloading is slower still.
    """
    for offload in (False, True):
        for gpus in sorted(gpu_counts, key=lambda gpus: (-(-gpus // GPUS_A_MACHINE), -gpus)):
            for checkpointing in (False, True):
                for method in METHODS:
                    tried = replace(training, gpus=gpus, gradient_checkpointing=checkpointing, method=method)
                    if method.offload_optimizer == offload and fits(shape, tried, card_gib):
                        return tried
    return None


def hours(shape: Shape, training: Training, tokens: int | None) -> float | None:
    """Hours of one pass over `tokens`; None where they are not known, and for offloading, whose speed is the host's.

    PaLM's operations for each token (arXiv:2204.02311, appendix B), two thirds of them under LoRA, which has no
    gradients of what is frozen. Checkpointing repeats the forward pass, a third of a full fine-tuning
    (arXiv:2205.05198, section 5).
    """
    if tokens is None or training.method.offload_optimizer:
        return None
    operations = flops_per_token(shape.multiplied, shape.layers, shape.query, training.sequence_length)
    thirds = (2 if training.lora else 3) + training.gradient_checkpointing
    return tokens * operations * thirds / 3 / (training.gpus * PEAK_BF16_FLOPS["A100"] * MFU) / 3600


# ------------------------------------------------------------------------------------------ serving


def kv_bytes(shape: Shape, width: int) -> int:
    """One token's keys and values in all layers (Kwon et al. 2023, arXiv:2309.06180, section 3: vLLM's cache)."""
    return 2 * shape.layers * shape.key * width


def serve(shape: Shape, width: int, context: int, card_gib: int) -> Serving | None:
    """The fewest GPUs that hold the weights, `width` bytes a number, and the keys and values of `context` tokens.

    Tensor parallelism shares each layer within a machine and divides the heads; pipeline parallelism shares the layers
    out over machines (vLLM's documentation, "Parallelism and Scaling"). None where MOST_GPUS do not do.
    """
    spreads = [(tensor, 1) for tensor in (1, 2, 4, 8)] + [(8, stages) for stages in (2, 4, 8, 16)]
    for tensor, stages in spreads:
        gpus = tensor * stages
        each = width * shape.parameters / gpus
        room = int(gpus * ((USABLE * card_gib - SERVING_GIB) * GIB - each) / kv_bytes(shape, width))
        if shape.heads % tensor == 0 and stages <= shape.layers and room >= context:
            return Serving(tensor, stages, each, room)
    return None
